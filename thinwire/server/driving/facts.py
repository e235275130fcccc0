"""What is journalled about one ask and its answer."""

from __future__ import annotations

from dataclasses import replace

from thinwire.core.ask_ids import asked_round
from thinwire.core.events import ClientAsked, StateLost, UpdateAccepted, UpdateDropped
from thinwire.core.messages import reply_to_json
from thinwire.core.types import Metrics, ReplyHead
from thinwire.server.moves import AskNow, Fold


def asked_fact(at: float, round_number: int, elapsed_s: float, payload_bytes: int, action: AskNow) -> ClientAsked:
    """A device is asked in the middle of a round: recorded before the ask leaves."""
    return ClientAsked(
        at=at,
        round=round_number,
        device=action.device,
        ask_id=action.ask_id,
        payload_bytes=payload_bytes,
        elapsed_s=elapsed_s,
        base_version=action.base_version,
        deadline_s=action.deadline_s,
        why=action.why,
        instead_of=action.instead_of,
    )


def accepted_fact(
    at: float, round_number: int, elapsed_s: float, head: ReplyHead, action: Fold, admitted: Metrics
) -> UpdateAccepted:
    """An answer counts for this round; the order of these is the order of folding. Of its metrics some are recorded."""
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
        head=reply_to_json(replace(head, metrics=admitted)),
        ignored=len(head.metrics) - len(admitted),
    )


def lost_fact(at: float, round_number: int, head: ReplyHead) -> list[StateLost]:
    """That a device began anew, where its answer says so."""
    update_id = head.update_id
    return [StateLost(at, round_number, update_id.device, str(update_id), head.lost)] if head.lost else []


def dropped_fact(
    at: float, round_number: int, elapsed_s: float, head: ReplyHead, reason: str, admitted: Metrics
) -> UpdateDropped:
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
        head=reply_to_json(replace(head, metrics=admitted)),
    )
