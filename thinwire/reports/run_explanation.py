"""This module explains where the time of a run went, by the sums over the explanations of its rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from thinwire.core.formatting import counted, duration
from thinwire.store import RunRow, Store
from thinwire.store.round_explanation import RoundExplanation, own_part
from thinwire.store.round_timing import OWN, STAGES
from thinwire.store.run_totals import RunTotals


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
