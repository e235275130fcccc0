"""Distribution of plan and model: each assignment carries only the parts that its device lacks.

The plan: an assignment names the plan by its digest if the device holds it. A device that has lost the plan fails with
`need-plan`, and gets the same assignment again with the whole plan.

The model: a device gets the changes since the version that it holds, or the whole model if that is smaller. The
aggregator derives the device's version from its last reply. This may be wrong after a lost disk or a restored backup.
Then the digest in the assignment does not match, the device fails with `base-mismatch`, and gets the same assignment
again with the whole model.

In both cases the round waits, and nothing counts against the device. Which devices hold the plan is not journalled,
because the form of an assignment does not change the reply. After a restart the hellos of the devices say it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.aggregation.downlink import BUFFERS, FULL, Downlink, way, write_model
from thinwire.core.events import ModelStored, ShadowStored
from thinwire.core.fleet import Arrival, Envelope, Hello, NodeJoined
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Failure, Part, ReplyHeader
from thinwire.server.aggregator import Model
from thinwire.server.model_store import Versions, parts_of
from thinwire.server.state.run_state import RunState


class PlanCache:
    """Holds which devices have the plan of one run.

    A device has the plan if its hello says so, or if it replied to an assignment that carried the plan.

    Invariant: an assignment is sent again at most once, and only to its own device. A device has at most `most`
    assignments at once.
    """

    def __init__(self, plan: Mapping[str, Any], digest: str, most: int) -> None:
        self.plan, self.digest = plan, digest
        self._sure: dict[str, bool] = {}  # device -> whether it holds the plan, learned since its hello
        self._last = SentAssignments(most)

    def plan_for(self, device: str, hello: Hello | None) -> Mapping[str, Any] | str:
        """Return the plan for an assignment to this device: the whole plan, or its digest if the device holds it."""
        said = hello is not None and self.digest in hello.plans
        return self.digest if self._sure.get(device, said) else self.plan

    def asked(self, envelopes: Sequence[Envelope]) -> None:
        """Remember assignments that are sent now."""
        self._last.remember(envelopes)

    def sent(self, device: str, ask_id: str) -> bool:
        """Return True if this process sent the assignment to the device and it has not failed.

        The fleet delivers such an assignment again by itself.
        """
        return self._last.find(device, ask_id) is not None

    def take(self, arrival: Arrival, anew: bool) -> Envelope | None:
        """Return the assignment to send again because of this arrival, or None if there is none.

        `anew`: the arrival is a hello that differs from the device's last one.
        """
        match arrival:
            case NodeJoined(device):
                if anew:
                    self._sure.pop(device, None)  # a new process of the device: its hello knows best
            case ReplyHeader():
                if (last := self._last.find(arrival.update_id.device, arrival.ask_id)) is not None:
                    self._sure[last.device] = True
            case Failure("need-plan", _, ask_id, device):
                self._sure[device] = False
                last = self._last.find(device, ask_id)
                if last is not None and isinstance(last.ask.plan, str):
                    again = replace(last, ask=replace(last.ask, plan=self.plan))
                    self._last.remember([again])
                    return again
                self._last.forget(device, ask_id)
            case Failure(_, _, ask_id, device):
                self._last.forget(device, ask_id)
        return None


class SentAssignments:
    """Holds the last `most` assignments of each device, which is as many as a device may have at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asks: dict[str, dict[str, Envelope]] = {}  # device -> ask_id -> assignment

    def remember(self, envelopes: Iterable[Envelope]) -> None:
        """Remember these assignments, and forget the oldest of each device above `most`."""
        for envelope in envelopes:
            asks = self._asks.setdefault(envelope.device, {})
            asks[envelope.ask.ask_id] = envelope
            while len(asks) > self._most:
                del asks[next(iter(asks))]

    def forget(self, device: str, ask_id: str) -> None:
        """Forget an assignment, if it is remembered."""
        self._asks.get(device, {}).pop(ask_id, None)

    def find(self, device: str, ask_id: str) -> Envelope | None:
        """Return the assignment if it went to this device and is remembered, otherwise None."""
        return self._asks.get(device, {}).get(ask_id)


Row = tuple[str, int, str]  # a part's name, length and SHA-256


@dataclass(frozen=True)
class ModelPayload:
    """The model parts for one device.

    `pieces` are the ranges of files (name, start, length) that the parts consist of. `name` is the file that holds all
    parts one after the other.
    """

    parts: tuple[Part, ...]
    pieces: tuple[tuple[str, int, int], ...]
    name: str

    @property
    def size(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.length for part in self.parts)


class ModelDistributor:
    """Distributes the model of one run: the whole model, or the compressed changes between versions.

    Invariant: an assignment is sent again with the whole model at most once, and only to its own device.
    """

    def __init__(self, plan: RunPlan, versions: Versions, past: RunState, model: Model) -> None:
        self.plan, self.versions, self.past, self.model = plan, versions, past, model
        self.downlink: Downlink | None = None
        if plan.downlink.compressed:
            shadow = versions.read(past.bases.shadow)[0] if past.bases.shadow else model.params
            self.downlink = Downlink(model.layout, plan.downlink.codec, shadow, past.version, plan.run.seed)
        self._lost: set[str] = set()  # devices that lost the version of their last reply
        self._last = SentAssignments(past.delay + 1)

    def publish(self, version: int, at: float) -> list[ShadowStored]:
        """Make the new version's compressed change and the replica durable; return the event that names them.

        Return no event if the replica is the model itself.
        """
        if self.downlink is None:
            return []
        every = self.plan.downlink.full_every
        news = self.downlink.publish(self.model.params, full=bool(every) and version % every == 0)
        assert news.version == version
        if not news.changes:
            return []
        path = self.versions.path(version)
        change, shadow = path.with_suffix(".change"), path.with_suffix(".shadow")
        write_atomically(change, b"".join(news.changes))
        rows = [(f"{version}/{i}", len(c), hashlib.sha256(c).hexdigest()) for i, c in enumerate(news.changes)]
        parts, digest = write_model(shadow, self.model.layout, self.downlink.shadow, self.model.buffers)
        assert digest == news.digest
        full = [(part.name, part.length, part.sha256) for part in parts]
        return [ShadowStored(at, version, digest, shadow.name, full, change.name, rows)]

    def parcel(self, device: str, but: str = "") -> ModelPayload:
        """Return the parts that bring this device to the newest version, in the smaller of the two forms.

        In a pipelined run the device will have completed its earlier assignments by then. `but` names the new
        assignment, which does not count among them.
        """
        base = self.past.bases.newest
        if self.downlink is not None and device not in self._lost:
            held = self.past.will_hold(device, but) if self.past.delay else self.past.bases.held.get(device)
            log = {v: self._logged(v) for v in range((held or 0) + 1, base.version + 1)}
            sizes = {version: _size(rows) for version, (_, rows) in log.items() if rows}
            if (versions := way(held, base.version, sizes, _size(base.parts))) is not None:
                return _changes(base, [log[version] for version in versions], held)
        return self.whole(base)

    def whole(self, base: ModelStored | ShadowStored) -> ModelPayload:
        """Return a whole version, as its file holds it."""
        return ModelPayload(parts_of(base), ((base.file, 0, _size(base.parts)),), base.file)

    def _logged(self, version: int) -> tuple[str, Sequence[Row]]:
        """Return the file of a version's change and its parts; no parts if the change is no longer logged."""
        stored = self.past.bases.changes.get(version)
        if stored is None or version <= self.past.version - self.plan.downlink.log_rounds:
            return "", ()
        return stored.change, stored.change_parts if (self.versions.folder / stored.change).exists() else ()

    def bundle(self, parcel: ModelPayload) -> Path | None:
        """Return the file with the parcel's parts one after the other, and write it if it is missing; None
        without parts.
        """
        if not parcel.parts:
            return None
        path = self.versions.folder / parcel.name
        made = len(parcel.pieces) == 1 and parcel.pieces[0][0] == parcel.name
        if not made and not (path.exists() and path.stat().st_size == parcel.size):
            write_atomically(path, b"".join(self._read(*piece) for piece in parcel.pieces))
        return path

    def _read(self, file: str, start: int, length: int) -> bytes:
        with (self.versions.folder / file).open("rb") as source:
            source.seek(start)
            return source.read(length)

    def asked(self, envelopes: Sequence[Envelope]) -> None:
        """Remember assignments that are sent now."""
        self._last.remember(envelopes)

    def take(self, arrival: Arrival) -> Envelope | None:
        """Return the assignment to send again with the whole model because of this arrival, or None if
        there is none.
        """
        if not isinstance(arrival, Failure) or arrival.kind != "base-mismatch":
            return None
        last = self._last.find(arrival.device, arrival.ask_id)
        if last is None or _is_full(last.ask.parts):
            return None
        self._lost.add(arrival.device)
        if last.ask.base_version == self.past.version:
            parcel = self.parcel(arrival.device)
        elif self.past.delay and arrival.ask_id in self.past.owed.of(arrival.device):
            parcel = self.whole(self.past.bases.of(last.ask.round))  # a pipelined assignment: its round is still open
        else:
            return None  # its round is closed, and its version replaced: the next assignment carries the whole model
        return replace(last, ask=replace(last.ask, parts=parcel.parts), bundle=self.bundle(parcel))

    def holds(self, device: str) -> None:
        """Note that the device replied, so it holds the version that its reply was made from."""
        self._lost.discard(device)


def _changes(
    base: ModelStored | ShadowStored, log: Sequence[tuple[str, Sequence[Row]]], held: int | None
) -> ModelPayload:
    """Return a parcel of successive changes, followed by the buffers, which exist only in the newest version."""
    rows, pieces = [row for _, rows in log for row in rows], [(file, 0, _size(rows)) for file, rows in log]
    if base.parts[-1][0] == BUFFERS:
        rows.append(base.parts[-1])
        pieces.append((base.file, _size(base.parts[:-1]), base.parts[-1][1]))
    name = pieces[0][0] if len(pieces) == 1 and log else f"v{base.version:06d}.from{held or 0:06d}"
    return ModelPayload(tuple(Part(*row) for row in rows), tuple(pieces), name)


def _size(rows: Sequence[Row]) -> int:
    return sum(length for _, length, _ in rows)


def _is_full(parts: Sequence[Part]) -> bool:
    return any(part.name.startswith(f"{FULL}/") for part in parts)
