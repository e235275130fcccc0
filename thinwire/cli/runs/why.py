"""`thinwire runs show --why`: where the time of a run and of each of its rounds went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.cli import say

if TYPE_CHECKING:
    from thinwire.store import RunRow, Store
    from thinwire.store.why import Why


def whys(store: Store, row: RunRow) -> list[Why]:
    """Of all closed rounds, in their order."""
    from thinwire.store.stages import turns
    from thinwire.store.why_of_run import round_trips
    from thinwire.store.why_of_run import whys as of_all

    rounds = store.rounds(row.run_id)
    rtts = round_trips(store.measures("rtt")) if row.source == "devices" else {}
    return of_all(row, rounds, store.updates(row.run_id), turns(rounds), rtts)


def document(found: list[Why]) -> dict[str, Any]:
    """What `--json --why` adds to the run's document."""
    from thinwire.store.why_of_run import in_all

    return {"why": _document(in_all(found)), "rounds_why": [{"round": one.round, **_document(one)} for one in found]}


def show(found: list[Why]) -> None:
    """One sentence for the run, a row of seconds a round in the stages that there were, a sentence for each of them."""
    from thinwire.store.stages import STAGES
    from thinwire.store.why_of_run import in_all

    if not found:
        say.line("no round of it has closed yet")
        return
    all_of_it = in_all(found)
    say.sentence(all_of_it.sentence)
    say.line()
    there = tuple(name for name in STAGES if any(name in {**one.stages, **one.uncounted} for one in found))
    wired = any(one.requests for one in found)
    header = ("round", "seconds", *there, "slowest", *(("requests",) if wired else ()), "not in time")
    rows = [(str(one.round), *_row(one, there, wired)) for one in found]
    say.table(header, [*rows, ("all", *_row(all_of_it, there, wired))], right=header[: 2 + len(there)])
    say.line()
    for one in found:
        say.sentence(one.sentence)


def _row(one: Why, stages: tuple[str, ...], wired: bool) -> tuple[str, ...]:
    from thinwire.core.texts import trip

    seconds = {**one.stages, **one.uncounted}
    spent = (say.NOTHING if name not in seconds else f"{seconds[name]:.2f}" for name in stages)
    made = str(one.requests or "")
    if one.rtt_s and one.trips_s:
        made += f" x {trip(one.rtt_s)} = {trip(one.trips_s)}"
    return f"{one.seconds:.2f}", *spent, one.device, *((made,) if wired else ()), ", ".join(one.waited_for)


def _document(one: Why) -> dict[str, Any]:
    return {
        "sentence": one.sentence, "seconds": one.seconds, "slowest": one.device, "stages": dict(one.stages),
        "uncounted": dict(one.uncounted), "waited_for": list(one.waited_for), "requests": one.requests,
        "rtt_s": one.rtt_s, "trips_s": one.trips_s,
    }  # fmt: skip
