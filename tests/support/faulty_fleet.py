"""A scripted fleet whose devices also break the rules: damaged frames, replies rounds too late, and further replies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from thinwire.core.fleet import Envelope, Spool
from thinwire.core.types import Assignment, Part, ReplyHeader, UpdateId, UpdateOutcome
from thinwire.simulation import Behavior, ScriptedDevice, ScriptedFleet
from thinwire.simulation.local_fleet import LocalLink
from thinwire.simulation.scripted_device import OutboxEntry, parts_of

Again = Literal["same", "new", "changed"]


@dataclass(frozen=True)
class FaultyBehavior(Behavior):
    """The behavior of a device that breaks the rules.

    - `garbage`: the frames are damaged, so their aggregation fails.
    - `held` = n: the reply is sent when the assignments of a round at least n later are sent.
    - `again`: what else the device sends: the same bytes, a second update for the same assignment, or other bytes
      under the same id.
    """

    garbage: bool = False
    held: int = 0
    again: tuple[Again, ...] = ()


@dataclass
class AttentiveDevice(ScriptedDevice):
    """A scripted device that remembers all outcomes of which it was told."""

    told: dict[UpdateId, UpdateOutcome] = field(default_factory=dict)

    def receive(self, assignment: Assignment) -> bool:
        self.told |= {outcome.update_id: outcome for outcome in assignment.outcomes}
        return super().receive(assignment)


def told_of(devices: Iterable[ScriptedDevice]) -> dict[UpdateId, UpdateOutcome]:
    """All outcomes of which these devices were told."""
    told: dict[UpdateId, UpdateOutcome] = {}
    for device in devices:
        assert isinstance(device, AttentiveDevice)
        told |= device.told
    return told


@dataclass(frozen=True)
class HeldReply:
    """A reply that is sent when the assignments of round `until` are sent."""

    until: int
    device: ScriptedDevice
    kept: OutboxEntry


class FaultyFleet(ScriptedFleet):
    """A scripted fleet that carries out each `FaultyBehavior`; other behaviors are those of a `ScriptedFleet`."""

    def __init__(self, *given: Any) -> None:
        self._held_back: list[HeldReply] = []
        self._more: dict[tuple[str, str], list[tuple[ReplyHeader, bytes]]] = {}  # device, assignment -> further replies
        super().__init__(*given)

    def restart(self, spool: Spool | None = None) -> Self:
        again = super().restart(spool)
        again._held_back, again._more = self._held_back, self._more
        return again

    def send(self, assignments: Sequence[Envelope]) -> None:
        super().send(assignments)
        latest = max(
            (envelope.assignment.round for envelope in assignments if envelope.assignment.kind == "train"), default=0
        )
        due = [one for one in self._held_back if one.until <= latest]
        self._held_back = [one for one in self._held_back if one.until > latest]
        for one in due:
            self._after(one.kept.upload_s, ScriptedFleet._end_upload, one.device, one.kept.assignment_id)

    def _begin_upload(self, device: ScriptedDevice, kept: OutboxEntry) -> None:
        behavior = kept.behavior
        if not isinstance(behavior, FaultyBehavior):
            super()._begin_upload(device, kept)
            return
        if behavior.garbage:
            kept.header, kept.body = damaged(kept.header, kept.body)
        self._more[device.name, kept.assignment_id] = [
            _once_more(device, kept, behavior, again) for again in behavior.again
        ]
        if behavior.held:
            self._held_back.append(HeldReply(kept.delivery.assignment.round + behavior.held, device, kept))
        else:
            super()._begin_upload(device, kept)

    def _deliver(self, link: LocalLink, kept: OutboxEntry) -> None:
        super()._deliver(link, kept)
        for header, body in () if kept.pushed else self._more.get((link.name, kept.assignment_id), ()):
            self.receive(link, header, body, kept.upload_s)


def damaged(header: ReplyHeader, body: bytes) -> tuple[ReplyHeader, bytes]:
    """The reply with other frames, whose digests are right."""
    frames, at = [], 0
    for part in header.parts:
        frame = body[at : at + part.length]
        frames.append(frame[:-1] + bytes([frame[-1] ^ 0x5A]) + b"?")
        at += part.length
    return replace(header, parts=parts_of(frames)), b"".join(frames)


def _once_more(
    device: ScriptedDevice, kept: OutboxEntry, behavior: FaultyBehavior, again: Again
) -> tuple[ReplyHeader, bytes]:
    if again == "same":
        return kept.header, kept.body
    if again == "changed":
        body = kept.body + b"!"
        parts = (Part("frame/0", len(body), hashlib.sha256(body).hexdigest()),)
        return replace(kept.header, parts=parts), body
    header, body = device.work.finish(kept.delivery, behavior)
    assert isinstance(header, ReplyHeader), "an assignment that was replied to can be replied to again"
    return damaged(header, body) if behavior.garbage else (header, body)
