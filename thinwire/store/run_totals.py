"""The sums over the explanations of a run's rounds, which the projection keeps beside the run, and the explanation of
the run that follows from them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from thinwire.core.formatting import counted, duration
from thinwire.store.round_explanation import RoundExplanation, own_part
from thinwire.store.round_timing import OWN, STAGES

if TYPE_CHECKING:
    from thinwire.store.read_models import RunRow
    from thinwire.store.store import Store

LEAST_S: Final = 1e-9  # a sum below it is what rounding left of zero


@dataclass
class RunTotals:
    """Holds the sums over the explanations of a run's rounds; `add` with the sign -1 takes an explanation out again."""

    rounds: int = 0
    seconds: float = 0.0
    requests: int = 0
    timed: int = 0  # requests of rounds with a measured round trip; their round trips took `trips_s`
    trips_s: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    uncounted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fewest: int | None = None  # clients selected for a round, as far as `saw` was called
    most: int = 0
    slowest: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)

    def add(self, one: RoundExplanation, sign: int = 1) -> None:
        """Add the explanation of a round."""
        self.rounds, self.seconds = self.rounds + sign, self.seconds + sign * one.seconds
        self.requests += sign * one.requests
        if one.rtt_s is not None:
            self.timed, self.trips_s = self.timed + sign * one.requests, self.trips_s + sign * one.requests * one.rtt_s
        for sums, parts in ((self.stages, one.stages), (self.uncounted, one.uncounted)):
            for name, took in parts.items():
                sums[name] += sign * took
        self.slowest.update({one.device: sign} if one.device else {})
        for name in one.waited_for:
            self.missed[name] += sign

    def saw(self, selected: int) -> None:
        """Record how many clients a round selected."""
        self.fewest = selected if self.fewest is None else min(selected, self.fewest)
        self.most = max(selected, self.most)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the sums that `to_json` gave, without a count of any client."""
        totals = cls(**{name: found[name] for name in NUMBERS if name in found})
        totals.stages.update(found.get("stages", {}))
        totals.uncounted.update(found.get("uncounted", {}))
        return totals

    def to_json(self) -> dict[str, Any]:
        """Return all sums but the counts of clients, as plain values."""
        parts = {"stages": self.stages, "uncounted": self.uncounted}
        kept = {name: {stage: took for stage, took in part.items() if took > LEAST_S} for name, part in parts.items()}
        return {name: getattr(self, name) for name in NUMBERS} | kept


NUMBERS: Final = ("rounds", "seconds", "requests", "timed", "trips_s", "fewest", "most")


def in_all(found: Iterable[RoundExplanation]) -> RoundExplanation:
    """Return the explanation of a run from those of its rounds."""
    totals = RunTotals()
    for one in found:
        totals.add(one)
    return explain_run(totals)


def totals_of(store: Store, row: RunRow) -> RunTotals:
    """Return the stored sums over the closed rounds of a run, with the clients that were counted most often."""
    totals = RunTotals.from_json(row.totals)
    totals.slowest, totals.missed = map(Counter, store.most_waited_for(row.run_id))
    return totals


def explain_run(totals: RunTotals) -> RoundExplanation:
    """Return the explanation of a run: the stages' sums, and the device that was waited for most often."""
    spent = {name: totals.stages[name] for name in STAGES if totals.stages.get(name, 0.0) > 0}
    uncounted = {name: totals.uncounted[name] for name in OWN if totals.uncounted.get(name, 0.0) > 0}
    said = f"{counted(totals.rounds, 'round')} took {duration(totals.seconds)}"
    if spent and totals.seconds:
        most = max(spent, key=lambda name: spent[name])
        said += f", {100 * spent[most] / totals.seconds:.0f} % of it in the stage {most}"
    (device, count), (silent, times) = map(_most, (totals.slowest, totals.missed))
    said += f"; {device} was the slowest in {count} of {totals.rounds}" if count else ""
    said += f"; {silent} had not answered in time in {times}" if times else ""
    said += own_part(totals.seconds, {}, uncounted)
    rtt_s, device = totals.trips_s / totals.timed if totals.timed else None, device if count else ""
    return RoundExplanation(0, totals.seconds, f"{said}.", device, spent, (), totals.requests, rtt_s, uncounted)


def _most(counts: Counter[str]) -> tuple[str, int]:
    """Return the client that was counted most often, of several the first by name; ("", 0) if there is none."""
    return min(counts.items(), key=lambda one: (-one[1], one[0]), default=("", 0))
