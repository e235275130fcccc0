"""Which asks a device holds and which were withdrawn: what one of its threads pulls, another one answers."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence

from thinwire.core.errors import BadPayload

REMEMBERED = 1024  # withdrawn asks


class Held:
    """Law: an ask is held from its whole arrival until it is answered or withdrawn; only others are given. Nobody
    answers a stop: it is held until a pull that names it is answered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, bool] = {}  # ask_id -> whether it is a stop
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def now(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def withdrawn(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._withdrawn)

    def arrived(self, ask_id: str, is_stop: bool) -> None:
        """Also one that was withdrawn before: it was sent anew."""
        with self._lock:
            self._held[ask_id] = is_stop
            self._withdrawn.pop(ask_id, None)

    def answered(self, ask_id: str) -> None:
        with self._lock:
            self._held.pop(ask_id, None)

    def said(self, ask_ids: Sequence[str]) -> None:
        """A pull that named these was answered: the aggregator knows of the stops among them."""
        with self._lock:
            for ask_id in [one for one in ask_ids if self._held.get(one)]:
                del self._held[ask_id]

    def forget(self) -> None:
        """Another process begins: everything is given to it again."""
        with self._lock:
            self._held.clear()

    def withdraw(self, control: bytes) -> None:
        """What the aggregator says beside an ask; `BadPayload` when it cannot be read."""
        try:
            ask_ids = [str(ask_id) for ask_id in json.loads(control).get("cancelled", ())]
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise BadPayload("cannot read what the aggregator says", why=str(error)) from error
        with self._lock:
            for ask_id in ask_ids:
                if self._held.pop(ask_id, None) is not None:  # of others an aggregator has nothing to say
                    self._withdrawn[ask_id] = None
            while len(self._withdrawn) > REMEMBERED:
                self._withdrawn.popitem(last=False)
