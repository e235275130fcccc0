"""How large an answer to an ask may be: known from the run's model before a byte of a body is taken."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.errors import NotFound
from thinwire.store import Store

BASE_BYTES = 64 * 2**20  # an answer to an ask that nobody knows, and room for heads of many segments
BYTES_A_PARAMETER = 8  # no codec sends more: an index of four bytes and a float32


def answer_limit(store: Store) -> Callable[[str], int]:
    """A function from an ask's id (RUN.ROUND.DEVICE) to the most bytes that its answer's parts may have."""
    sizes: dict[str, int] = {}

    def limit(ask_id: str) -> int:
        run_id = ask_id.partition(".")[0]
        if run_id not in sizes:
            try:
                sizes[run_id] = store.run(run_id).size if run_id else 0
            except NotFound:
                return BASE_BYTES
        return BASE_BYTES + BYTES_A_PARAMETER * sizes[run_id]

    return limit
