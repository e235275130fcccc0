"""Checks a reply's header before a round sees it, and finds what was assigned for it.

Headers come from devices, and are not trusted.
"""

from __future__ import annotations

from thinwire.core.types import ReplyHeader, assignment_id_of, assignment_round, is_follow_up
from thinwire.server.context import RunContext

MAX_CODEC_LETTERS = 64  # in a reply that names a codec; the frames themselves decide whether they can be decoded


def invalid_reply(running: RunContext, header: ReplyHeader) -> tuple[str, str] | None:
    """Return kind and text of the failure if a reply is not a valid update of this run, otherwise None.

    A reply is valid only if its assignment went to the same device. It must have frames, and start from the version
    that the assignment named. The update of an invalid reply is not dropped: its assignment fails.
    """
    if header.update_id.device in running.revoked():
        return "refused", "revoked"
    assigned = running.past.ledger.find(header.assignment_id, header.update_id.device)
    if assigned is None and not is_forgotten(running, header):
        return "protocol", "it replies to no assignment of its own"
    if not header.parts:
        return "protocol", "an answer without frames"
    if assigned is not None and header.base_version != assigned.base_version:
        return "base-mismatch", f"trained from version {header.base_version}, assigned from {assigned.base_version}"
    if len(header.codec) > max(MAX_CODEC_LETTERS, len(assigned_codec(running, header))):
        return "protocol", f"it names a codec in {len(header.codec)} letters, and its assignment has a shorter one"
    return None


def is_forgotten(running: RunContext, header: ReplyHeader) -> bool:
    """Return True if the device may have had this assignment in a round that the ledger has forgotten."""
    name = assignment_id_of(
        running.run_id,
        assignment_round(header.assignment_id),
        header.update_id.device,
        is_follow_up(header.assignment_id),
    )
    return header.assignment_id == name and running.past.ledger.is_forgotten(name)


def assigned_codec(running: RunContext, header: ReplyHeader) -> str:
    """Return the codec that was assigned for this reply.

    The codec of a late reply, or of another device, may differ from the codec of most devices.
    """
    assigned = running.past.ledger.find(header.assignment_id, header.update_id.device)
    return assigned.codec if assigned else running.codec


def assigned_steps(running: RunContext, header: ReplyHeader) -> int:
    """Return the steps that were assigned for this reply; 0 if the plan counts epochs instead."""
    steps = running.plan.local.steps
    if steps == "auto":
        assigned = running.past.ledger.find(header.assignment_id, header.update_id.device)
        return assigned.steps if assigned else 0
    return steps or 0
