"""Shutting a device out: the row counts at the door from the next request on, the service then clears what is open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.places import alive
from thinwire.cli.waiting import until

if TYPE_CHECKING:
    from thinwire.store import Store

CONFIRMED_S = 5.0


def shut_out(store: Store, home: Path | None, name: str, who: str) -> tuple[bool | None, dict[str, list[int]]]:
    """Revoke; gives whether a running aggregator has confirmed it (None: none is running), and what stays folded.

    Confirmed means: its waiting calls are answered, its uploads gone, its open asks refused, what it had sent and
    was not folded dropped. Without an aggregator the next one does that before its door opens.
    """
    store.roster.revoke(name, who)
    if alive(home) is None:
        return None, dict(store.folded_rounds(name))
    order = store.order("revoke", args={"device": name}, who=who)
    answered = until(lambda: store.result(order) is not None, CONFIRMED_S)
    result: dict[str, Any] = store.result(order) or {}
    rounds = result.get("rounds")
    return answered and bool(result.get("done")), dict(store.folded_rounds(name) if rounds is None else rounds)
