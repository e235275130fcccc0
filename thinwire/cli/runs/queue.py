"""A run that has to wait for its turn: behind which one, and what that one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.store import Store


def queued(store: Store, run_id: str) -> str:
    """One sentence; "" for a run whose turn it is, or that is over."""
    first = store.next_run()
    if first is None or first.run_id == run_id or store.run(run_id).status != "queued":
        return ""
    does = first.status_text if first.status == "waiting" else first.status
    return f"waiting in the queue behind {first.run_id}, which is {does}"
