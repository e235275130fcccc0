"""How one data set is cut into the parts of many clients (`compute/partitions.py`), refused in our own words."""

from __future__ import annotations

from thinwire.client.compute import partitions
from thinwire.client.refusals import in_our_words

__all__ = ["held_out", "own_part", "parse_split", "partition"]

parse_split = in_our_words()(partitions.parse_split)
partition = in_our_words()(partitions.partition)
own_part = in_our_words()(partitions.own_part)
held_out = partitions.held_out
