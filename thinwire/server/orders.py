"""What people have ordered, as rows of the store: so an order survives a crash, and stays on record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from thinwire.store import Order, Store

LOOK_S = 0.2  # orders are looked for at most this often


class Orders:
    """The service's view of `store.commands`; an order is answered when it has taken effect."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked_at = 0.0
        self._open: list[Order] = []
        self._ending = False

    def _look(self) -> list[Order]:
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._open, self._looked_at = self._store.pending_orders(), time.monotonic()
        return self._open

    def stop_service(self) -> bool:
        """Whether the service was ordered to end; once true it stays true."""
        self._ending = self._ending or self._answer("stop-service", "")
        return self._ending

    def stop_run(self, run_id: str) -> bool:
        """Whether this run was ordered to end."""
        return self._answer("stop-run", run_id)

    def runs_to_stop(self) -> list[str]:
        """The runs that were ordered to end and have not been told."""
        return [order.run_id for order in self._look() if order.kind == "stop-run"]

    def revoked(self) -> list[Order]:
        """Orders to shut a device out, that were not carried out yet; `done` says that one was."""
        return [order for order in self._look() if order.kind == "revoke"]

    def done(self, order: Order, result: Mapping[str, Any]) -> None:
        self._store.answer(order.id, {"done": True, **result})
        self._open = [other for other in self._open if other.id != order.id]

    def _answer(self, kind: str, run_id: str) -> bool:
        found = [order for order in self._look() if order.kind == kind and order.run_id == run_id]
        for order in found:
            self.done(order, {})
        return bool(found)
