"""The law that every assignment has exactly one outcome when its run is over, as assignment_ledger.py defines it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from thinwire.core.events import (
    OVER,
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Event,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.run_events import is_sampled
from thinwire.store import Store

GIVEN_UP, BACK, ACCEPTED, DROPPED, FAILED, UNTAKEN, TOO_SOON = "GBADFOS"
ORDERLY = re.compile(
    "(GB)*([GS]?(A|AD|D)|F|G|O|S)"
)  # what may be said of an assignment, in order: its outcome is the last letter
SHOWN = {DROPPED: "dropped", FAILED: "failed", GIVEN_UP: "failed", UNTAKEN: "over", TOO_SOON: "over"}


def every_assignment_has_one_outcome(store: Store, run_id: str, events: Sequence[Event] | None = None) -> None:
    """Of a run that is over, by its journal, `events`; what is shown of its assignments is the same."""
    if events is None:
        events = [event for _, event in store.events(run_id)]
    opened = [assignment_id for e in events if isinstance(e, RoundOpened) for assignment_id in e.assignments.values()]
    assigned = opened + [e.assignment_id for e in events if isinstance(e, ClientSelected) and e.why]
    assert len(set(assigned)) == len(assigned)
    said, answers = said_of(events)
    assert said.keys() == set(assigned), "of each there is a fact, and of nothing else"
    aggregated = {update_id for e in events if isinstance(e, RoundClosed) for update_id in e.aggregated}
    shown = {row.assignment_id: row.outcome.removesuffix("-late") for row in store.updates(run_id)}
    sampled = is_sampled(store.run(run_id).plan)
    assert shown.keys() == (set() if sampled else set(assigned))
    for assignment_id, letters in said.items():
        assert ORDERLY.fullmatch(letters), f"{assignment_id}: {letters}"
        if sampled:
            continue
        counts = "aggregated" if answers.get(assignment_id) in aggregated else "dropped"
        assert shown[assignment_id] == SHOWN.get(letters[-1], counts), f"{assignment_id}: {letters}"


def said_of(events: Sequence[Event]) -> tuple[dict[str, str], dict[str, str]]:
    """assignment_id -> a letter for each fact about it, in the journal's order; and the answer that they are about."""
    said, answers = defaultdict[str, str](str), dict[str, str]()
    for e in events:
        match e:
            case UpdateAccepted() | UpdateDropped():
                if answers.setdefault(e.assignment_id, e.update_id) == e.update_id:
                    said[e.assignment_id] += ACCEPTED if isinstance(e, UpdateAccepted) else DROPPED
                else:
                    assert isinstance(e, UpdateDropped), (
                        "an assignment has one answer, and what comes after it is dropped"
                    )
            case ClientFailed():
                letter = {"offline": GIVEN_UP, "stale": GIVEN_UP, OVER: UNTAKEN}.get(e.kind, FAILED)
                said[e.assignment_id] += TOO_SOON if letter == GIVEN_UP and e.is_over else letter
            case ClientReconnected():
                said[e.assignment_id] += BACK
    return said, answers
