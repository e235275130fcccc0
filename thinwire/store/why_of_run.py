"""Why a run took as long as it did: the reasons of its rounds, and what they come to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from thinwire.core.texts import counted, duration
from thinwire.store.rows import MeasureRow, RoundRow, RunRow, UpdateRow
from thinwire.store.stages import OWN, STAGES
from thinwire.store.why import Why, why
from thinwire.store.why_words import noun, own_part


def whys(
    run: RunRow, rounds: Sequence[RoundRow], updates: Iterable[UpdateRow], since: Mapping[int, float | None],
    rtts: Mapping[str, float] | None = None,
) -> list[Why]:  # fmt: skip
    """Of those of these rounds that are closed, in their order. `updates`: all that were asked for or folded in them;
    `since`: when each began to take answers (`turns`); `rtts`: seconds by device (`round_trips`).
    """
    asks, earlier = defaultdict[int, list[UpdateRow]](list), defaultdict[int, list[UpdateRow]](list)
    for one in updates:
        asks[one.round].append(one)
        if one.folded_round not in (None, one.round):
            earlier[one.folded_round or 0].append(one)
    simulated = run.source == "sim"
    return [
        why(one, asks[one.round], run.size, earlier[one.round], since[one.round], simulated=simulated, rtts=rtts)
        for one in rounds if one.reason
    ]  # fmt: skip


def round_trips(measures: Iterable[MeasureRow]) -> dict[str, float]:
    """Each device's median, in seconds."""
    return {one.device: one.p50 for one in measures if one.kind == "rtt" and one.p50}


def in_all(found: Sequence[Why]) -> Why:
    """Of a run: the sums of its rounds' stages, along different devices, and who was waited for most often."""
    took = sum(one.seconds for one in found)
    spent = _summed(STAGES, [one.stages for one in found])
    uncounted = _summed(OWN, [one.uncounted for one in found])
    said = f"{counted(len(found), 'round')} took {duration(took)}"
    if spent and took:
        most = max(spent, key=lambda name: spent[name])
        said += f", {100 * spent[most] / took:.0f} % of it {noun(most)}"
    slowest = Counter(one.device for one in found if one.device).most_common(1)
    device, count = slowest[0] if slowest else ("", 0)
    said += f"; {device} was the slowest in {count} of {len(found)}" if device else ""
    missed = Counter(name for one in found for name in one.waited_for).most_common(1)
    said += f"; {missed[0][0]} had not answered in time in {missed[0][1]}" if missed else ""
    said += own_part(took, {}, uncounted)
    requests, trips_s = 0, 0.0
    for one in found:
        if one.rtt_s is not None:
            requests, trips_s = requests + one.requests, trips_s + one.requests * one.rtt_s
    rtt_s = trips_s / requests if requests else None
    return Why(0, took, f"{said}.", device, spent, (), sum(one.requests for one in found), rtt_s, uncounted)


def _summed(names: Iterable[str], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What took no time is left out."""
    sums = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return {name: value for name, value in sums.items() if value > 0}
