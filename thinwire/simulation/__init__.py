"""Fleets without a network: the same plan, task and aggregator, with clients in this process."""

from thinwire.client.partitions import own_part
from thinwire.simulation.local import LocalFleet, LocalLink
from thinwire.simulation.run import History, run_sim, simulate

__all__ = ["History", "LocalFleet", "LocalLink", "own_part", "run_sim", "simulate"]
