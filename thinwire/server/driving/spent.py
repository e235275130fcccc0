"""Where a round's time went: along its slowest client, then the aggregator's own part."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.events import RoundOpened
from thinwire.core.types import ReplyHead


def where_time_went(
    opened: RoundOpened, heads: Sequence[ReplyHead], fold_s: float, step_s: float, store_s: float
) -> tuple[str, dict[str, float]]:
    """(the device that answered last, seconds by stage). Stages on the device are by its own clock."""
    server = {"fold_s": fold_s, "step_s": step_s, "store_s": store_s}
    arrived = [head for head in heads if head.transfer and head.ask_id in opened.asks.values()]
    if not arrived:
        return "", server
    last = max(arrived, key=_arrived_at)
    assert last.transfer is not None
    t = last.timings
    stages = {
        "wait_s": max(0.0, last.transfer.pulled_at - opened.at),
        "download_s": t.download_s,
        "queue_s": t.queue_s,
        "evaluate_s": t.evaluate_s,
        "train_s": t.train_s,
        "encode_s": t.encode_s,
        "upload_s": max(0.0, last.transfer.arrived_at - last.transfer.began_at),
    }
    return last.update_id.device, stages | server


def last_of(heads: Sequence[ReplyHead]) -> str:
    """The device that filled a buffer: it answered last, whenever it was asked. "" where nothing says when."""
    arrived = [head for head in heads if head.transfer]
    return max(arrived, key=_arrived_at).update_id.device if arrived else ""


def _arrived_at(head: ReplyHead) -> float:
    return head.transfer.arrived_at if head.transfer else 0.0
