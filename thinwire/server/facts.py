"""What is journalled about one answer."""

from __future__ import annotations

from thinwire.core.events import UpdateAccepted, UpdateDropped
from thinwire.core.messages import reply_to_json
from thinwire.core.types import ReplyHead
from thinwire.server.moves import Fold
from thinwire.server.past import asked_round


def accepted_fact(at: float, round_number: int, elapsed_s: float, head: ReplyHead, action: Fold) -> UpdateAccepted:
    """An answer counts for this round; the order of these is the order of folding."""
    return UpdateAccepted(
        at=at,
        round=round_number,
        asked_round=asked_round(head.ask_id),
        device=head.update_id.device,
        ask_id=head.ask_id,
        update_id=str(head.update_id),
        staleness=action.staleness,
        discount=action.discount,
        late=action.late,
        elapsed_s=elapsed_s,
        head=reply_to_json(head),
    )


def dropped_fact(at: float, round_number: int, elapsed_s: float, head: ReplyHead, reason: str) -> UpdateDropped:
    """An answer does not count, and why."""
    return UpdateDropped(
        at=at,
        round=round_number,
        asked_round=asked_round(head.ask_id),
        device=head.update_id.device,
        ask_id=head.ask_id,
        update_id=str(head.update_id),
        reason=reason,
        elapsed_s=elapsed_s,
        head=reply_to_json(head),
    )
