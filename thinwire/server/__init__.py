"""The aggregator: it selects devices, closes each round for a stated reason, and resumes runs after a crash.

Read it in this order:

    round_events      events that a round receives, actions that it returns
    round             one synchronous round without I/O, with its concurrency slots
    buffered_round    the asynchronous round that replaces it in a buffered plan
    policy/           selection, deadlines, codecs, local work: pure decisions with their reasons
    state/            the run's state, rebuilt from its journal by the live run and by a resume
    context           what all drivers of one run share: plan, state, model, store, fleet, clock
    round_open        decides a round and builds its state machine
    round_runner      drives the round over fleet, journal and aggregation
    aggregator        the running sum of a round, and the step to the next model
    round_close       step, new version, record of the round's end
    run               one run, from its first round or from where it was, to its end
    recovery          the open round after a restart
    pipelining        several open rounds, one of them current
    service           one run after the other, and the commands of people

The other modules, when a question leads there:

    dispatch          one assignment for one device; candidates for replacements
    distribution      which parts of plan and model an assignment carries
    evaluation        the clients' metrics of one model version
    idle              polling between rounds
    initial_model     the first model from a device
    model_store       model versions on disk
    run_end           last evaluation, outcomes, notices to devices
    submit            how a run gets into the queue; size limits of replies
"""
