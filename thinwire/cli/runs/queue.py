"""A run that has to wait for its turn: behind which one, and what that one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.store import Store


def queued(store: Store, run_id: str) -> str:
    """One sentence; "" for a run whose turn it is, that is over, or that is simulated and waits for nobody."""
    first, row = store.next_run(), store.run(run_id)
    if first is None or first.run_id == row.run_id or (row.status, row.source) != ("queued", "devices"):
        return ""
    does = first.status_text if first.status == "waiting" else first.status
    return f"waiting in the queue behind {first.run_id}, which is {does}"
