"""The figure, from seeds B: the ratio of the selected chain if it is non-inferior there. There is no second pick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.accuracy_bytes.bound import Paired
from benchmarks.accuracy_bytes.selection import FALLBACK
from benchmarks.accuracy_bytes.trials import Chain


@dataclass(frozen=True)
class OnB:
    """A chain on the fresh seeds: its ratio of payload bytes up, and its difference to fp32."""

    chain: Chain
    ratio: float
    paired: Paired


@dataclass(frozen=True)
class Conclusion:
    figure: float
    chain: Chain | None
    why: str


def conclusion(selected: OnB, fallback: Mapping[Chain, OnB]) -> Conclusion:
    """`fallback` holds the chain fixed in advance, where the selected one failed and it had to be run."""
    if selected.paired.non_inferior:
        return Conclusion(selected.ratio, selected.chain, "the selected chain is non-inferior on seeds B")
    other = fallback.get(FALLBACK)
    if selected.chain != FALLBACK and other is not None and other.paired.non_inferior:
        return Conclusion(other.ratio, FALLBACK, "the selected chain failed on seeds B: of the chain fixed in advance")
    return Conclusion(1.0, None, "no chain that was allowed is non-inferior on seeds B")
