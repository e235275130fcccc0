"""`thinwire runs show --why`: where the time of a run and of each of its rounds went."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from thinwire.cli import say

if TYPE_CHECKING:
    from thinwire.store import RunRow, Store, UpdateRow
    from thinwire.store.why import Why


def whys(store: Store, row: RunRow) -> list[Why]:
    """Of all closed rounds, in their order."""
    from thinwire.store.stages import turns
    from thinwire.store.why import why

    asks, earlier = defaultdict[int, list["UpdateRow"]](list), defaultdict[int, list["UpdateRow"]](list)
    for one in store.updates(row.run_id):
        asks[one.round].append(one)
        if one.folded_round not in (None, one.round):
            earlier[one.folded_round or 0].append(one)
    rounds = store.rounds(row.run_id)
    since, closed = turns(rounds), [found for found in rounds if found.reason]
    return [why(one, asks[one.round], row.size, earlier[one.round], since[one.round]) for one in closed]


def document(found: list[Why]) -> dict[str, Any]:
    """What `--json --why` adds to the run's document."""
    from thinwire.store.why import in_all

    return {"why": _document(in_all(found)), "rounds_why": [{"round": one.round, **_document(one)} for one in found]}


def show(found: list[Why]) -> None:
    """One sentence for the run, a row of seconds a round in the stages that there were, a sentence for each of them."""
    from thinwire.store.stages import STAGES
    from thinwire.store.why import in_all

    if not found:
        say.line("no round of it has closed yet")
        return
    all_of_it = in_all(found)
    say.line(all_of_it.sentence)
    say.line()
    there = tuple(name for name in STAGES if any(name in one.stages for one in found))
    header = ("round", "seconds", *there, "slowest", "not in time")
    rows = [(str(one.round), *_row(one, there)) for one in found]
    say.table(header, [*rows, ("all", *_row(all_of_it, there))], right=header[: 2 + len(there)])
    say.line()
    for one in found:
        say.line(one.sentence)


def _row(one: Why, stages: tuple[str, ...]) -> tuple[str, ...]:
    spent = (say.NOTHING if name not in one.stages else f"{one.stages[name]:.2f}" for name in stages)
    return f"{one.seconds:.2f}", *spent, one.device, ", ".join(one.waited_for)


def _document(one: Why) -> dict[str, Any]:
    return {
        "sentence": one.sentence, "seconds": one.seconds, "slowest": one.device, "stages": dict(one.stages),
        "waited_for": list(one.waited_for), "requests": one.requests,
    }  # fmt: skip
