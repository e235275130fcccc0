"""The aggregator: it selects devices, closes each round for a stated reason, and resumes runs after a crash.

Read it in this order:

    round_events      events that a round receives, and actions that it returns
    round             one synchronous round without I/O, and what all kinds of rounds share
    policy/           selection, deadlines, codecs, local work: pure decisions with their reasons
    state/            the run's state, rebuilt from its journal by the live run and by a resume
    context           what all drivers of one run share: plan, state, model, store, fleet, clock; its assignments
    round_mode        all in which synchronous and other rounds differ; decides a round
    round_runner      drives the round over fleet, journal and aggregation
    aggregator        the running sum of a round, the caps on weights, and the step to the next model
    round_close       the order of additions; step, new version, record of the round's end
    run               one run, from its first round or from where it was, to its end
    command_queue     the commands of people, as rows that are answered when they have taken effect
    recording_fleet   the fleet of all runs: it records who connects, and carries out commands that no driver does
    dispatcher        turns of the drivers of several runs; a full disk pauses all of them
    service           several runs at once, within limits of memory and of the size of replies

The other modules, when a question leads there:

    reducing_aggregator  the updates of a round whose plan names a reduction in place of the mean
    buffered_round    the asynchronous mode: its round and how it differs
    secure_mode       a round with secure aggregation: its phases under one deadline
    secure_round_runner  drives a secure round over fleet and journal
    secure_sum        the masked sum of a secure round
    private_mode      the mode of differential privacy: a release is reserved, noised, committed
    privacy_budget    which clients of a private run may take part in another round
    tree_noise        the noise of tree aggregation
    pipelining        the pipelined mode: several open rounds, one of them current
    recovery          the open round after a restart
    evaluation        the clients' metrics of one model version
    initial_model     the first model from a device
    model_files       the first model from a file or from another run
    model_store       model versions on disk, and which parts of plan and model an assignment carries
    run_end           last evaluation, outcomes, notices to devices
    submit            how a run gets into the queue
    run_extension     more rounds for a run that is over
    run_deletion      deletion of runs, on command and by age
    holdout           evaluation on the operator's data
    round_measurements  what a closed round shows of its devices: speed, time by stage, names of metrics
    concurrency       the slots of a plan with `max_concurrency`
    device_terms      what a round assigns to each device, and the check of a reply against it
    leases            which of several runs may select a device
"""
