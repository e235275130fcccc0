"""How fast one answer came up."""

from __future__ import annotations

from thinwire.store import UpdateRow


def upload_rate(one: UpdateRow) -> float | None:
    """Bytes a second from an answer's first byte to its last; None where nothing was measured."""
    size = one.payload_up if one.wire_up is None else one.wire_up
    if one.arrived_at is None or one.began_at is None or one.arrived_at <= one.began_at or not size:
        return None
    return size / (one.arrived_at - one.began_at)
