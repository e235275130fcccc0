"""Simulate federated learning without a network: the same plan, task and aggregator, over simulated clients.

Read the files in this order:

    run             `simulate` and `run_scripted`: a plan over simulated clients, stored like any other run
    checks          which plan, task and options are refused before the run begins
    local_fleet     assignments and replies between the aggregator and the clients, in one process
    client_pool     many clients in turn, by the code of real ones (client/handler.py)
    process_pool    the same work in several processes, to the same bits
    storage         replies and client state in memory; the resume of a simulation that was killed
    history         the result of `simulate`
    scripted_device a device whose times and failures a script decides; it trains or sends synthetic updates
    scripted_fleet  scripted devices on one virtual clock
    holdout         evaluation on the operator's data
    sweep           many simulations that differ in keys of the plan and in seeds

A simulated client trains, encodes and keeps its residual like a device. It differs in this:

- It has no transport: no TLS, no signatures, no Flower. It is always online, and its wire bytes are None.
- Time is its own clock: the duration of its own work, or `step_s` for each step. Clients take turns on this machine.
- It has no owner's policy, and in secure rounds its identity key follows from its name.
- Its state is in memory until it is evicted, unless the simulation is resumable or has several processes.
"""

from thinwire.client.task import own_part
from thinwire.simulation.history import History, RunFailed
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.run import run_scripted, run_sim, simulate, task_report
from thinwire.simulation.scripted_device import (
    Behavior,
    LogNormal,
    RandomScript,
    Script,
    ScriptedDevice,
    SyntheticUpdates,
    Training,
    TrainingWork,
    Work,
)
from thinwire.simulation.scripted_fleet import ScriptedFleet
from thinwire.simulation.storage import InMemorySpool

__all__ = [
    "Behavior", "History", "InMemorySpool", "LocalFleet", "LocalLink", "LogNormal", "RandomScript", "RunFailed",
    "Script", "ScriptedDevice", "ScriptedFleet", "SyntheticUpdates", "Training", "TrainingWork", "Work", "own_part",
    "run_scripted", "run_sim", "simulate", "task_report",
]  # fmt: skip
