"""Fleets without a network, and runs on them."""

from thinwire.client.partitions import parse_split, partition
from thinwire.simulation.history import History
from thinwire.simulation.local import LocalFleet
from thinwire.simulation.run import run_sim, simulate

__all__ = ["History", "LocalFleet", "parse_split", "partition", "run_sim", "simulate"]
