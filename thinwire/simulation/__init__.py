"""This package simulates federated learning without a network: the same plan, task and aggregator, over simulated
clients.
"""

from thinwire.client.task import own_part
from thinwire.simulation.history import History, RunFailed
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.run import run_scripted, run_sim, simulate, task_report
from thinwire.simulation.scripted_device import (
    LogNormal,
    RandomScript,
    Script,
    ScriptedDevice,
    SyntheticUpdates,
    Training,
    TrainingWork,
    Turn,
    Work,
)
from thinwire.simulation.scripted_fleet import ScriptedFleet
from thinwire.simulation.storage import InMemorySpool

__all__ = [
    "History", "InMemorySpool", "LocalFleet", "LocalLink", "LogNormal", "RandomScript", "RunFailed", "Script",
    "ScriptedDevice", "ScriptedFleet", "SyntheticUpdates", "Training", "TrainingWork", "Turn", "Work", "own_part",
    "run_scripted", "run_sim", "simulate", "task_report",
]  # fmt: skip
