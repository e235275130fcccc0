"""The aggregator's decisions: who is asked, when a round closes and why, and how a run goes on after a crash.

To be read in this order:

    moves       what can happen to a round, and what it can decide
    round       one round without I/O; `buffered` stands in its place where updates are asynchronous; `places` is who of
                those that are asked counts as at work
    cohort      who is asked, and why others are not
    choices/    for what, in which codec and until when: pure, by what is known of devices (`links` is the estimating)
    recorded/   what a run has decided so far, read from its journal: a restart knows what the process before it knew
    model/      the versions on disk, the sum of a round, the step to the next one
    driving/    all of that over a fleet, clock and store: a round is opened, asked, taken in and closed
    run         one run from its first round, or from where it was, to its end
    service     one run after the other, and what people order; `submit` is how a run gets into its queue
"""
