"""Runs that have to wait for their turn: behind which ones, and what the one does whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.store.rows import RunRow


def behind(row: RunRow, line: Sequence[RunRow]) -> str:
    """What a run of the queue waits for, where `line` is `Store.line()`: every run on devices whose turn comes.

    "" for a run whose turn it is, that is over, or that is simulated and waits for nobody.
    """
    ids = [one.run_id for one in line]
    if row.status != "queued" or row.run_id not in ids[1:]:
        return ""
    first = line[0]
    does = first.status_text if first.status == "waiting" else first.status
    between = ids[1 : ids.index(row.run_id)]
    if not between:
        return f"waiting in the queue behind {first.run_id}, which is {does}"
    others = between[0] if len(between) == 1 else f"{len(between)} more"
    return f"waiting in the queue behind {first.run_id} and {others}; {first.run_id} is {does}"
