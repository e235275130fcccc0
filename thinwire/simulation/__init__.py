"""Fleets without a network: the same plan, task and aggregator, with clients in this process."""

from thinwire.client.partitions import own_part
from thinwire.simulation.local import LocalFleet, LocalLink
from thinwire.simulation.made_up import MadeUp, Work
from thinwire.simulation.run import History, run_sim, simulate
from thinwire.simulation.scripted import ScriptedFleet
from thinwire.simulation.scripted_device import ScriptedDevice
from thinwire.simulation.scripted_run import reported, run_scripted
from thinwire.simulation.spool import HeldSpool
from thinwire.simulation.trained import Trained, Training
from thinwire.simulation.turns import LogNormal, Paced, Script, Turn

__all__ = [
    "HeldSpool",
    "History",
    "LocalFleet",
    "LocalLink",
    "LogNormal",
    "MadeUp",
    "Paced",
    "Script",
    "ScriptedDevice",
    "ScriptedFleet",
    "Trained",
    "Training",
    "Turn",
    "Work",
    "own_part",
    "reported",
    "run_scripted",
    "run_sim",
    "simulate",
]
