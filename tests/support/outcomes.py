"""The law that every ask has exactly one outcome when its run is over, as assignment_ledger.py defines it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from thinwire.core.events import (
    OVER,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Event,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.store import Store

GIVEN_UP, BACK, ACCEPTED, DROPPED, FAILED, UNTAKEN = "GBADFO"
ORDERLY = re.compile("(GB)*(G?(A|AD|D)|F|G|O)")  # what may be said of an ask, in order: its outcome is the last letter
SHOWN = {DROPPED: "dropped", FAILED: "failed", GIVEN_UP: "failed", UNTAKEN: "over"}


def every_ask_has_one_outcome(store: Store, run_id: str) -> None:
    """Of a run that is over, by its journal; what is shown of its asks is the same."""
    events = [event for _, event in store.events(run_id)]
    opened = [ask_id for e in events if isinstance(e, RoundOpened) for ask_id in e.asks.values()]
    asked = opened + [e.ask_id for e in events if isinstance(e, ClientAsked) and e.why]
    assert len(set(asked)) == len(asked)
    said, answers = said_of(events)
    assert said.keys() == set(asked), "of each there is a fact, and of nothing else"
    folded = {update_id for e in events if isinstance(e, RoundClosed) for update_id in e.folded}
    shown = {row.ask_id: row.outcome.replace("late", "folded") for row in store.updates(run_id)}
    assert shown.keys() == set(asked)
    for ask_id, letters in said.items():
        assert ORDERLY.fullmatch(letters), f"{ask_id}: {letters}"
        counts = "folded" if answers.get(ask_id) in folded else "dropped"
        assert shown[ask_id] == SHOWN.get(letters[-1], counts), f"{ask_id}: {letters}"


def said_of(events: Sequence[Event]) -> tuple[dict[str, str], dict[str, str]]:
    """ask_id -> a letter for each fact about it, in the journal's order; and the answer that they are about."""
    said, answers = defaultdict[str, str](str), dict[str, str]()
    for e in events:
        match e:
            case UpdateAccepted() | UpdateDropped():
                if answers.setdefault(e.ask_id, e.update_id) == e.update_id:
                    said[e.ask_id] += ACCEPTED if isinstance(e, UpdateAccepted) else DROPPED
                else:
                    assert isinstance(e, UpdateDropped), "an ask has one answer, and what comes after it is dropped"
            case ClientFailed():
                said[e.ask_id] += {"left": GIVEN_UP, "stale": GIVEN_UP, OVER: UNTAKEN}.get(e.kind, FAILED)
            case ClientBack():
                said[e.ask_id] += BACK
    return said, answers
