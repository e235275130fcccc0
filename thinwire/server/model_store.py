"""Model versions on disk, and their distribution: an assignment carries only what its device lacks of plan and model.

On disk there is one file for each version, written once and sent to devices unchanged. A file holds one identity frame
for each segment, then a frame of float buffers if the model has any. The state of the server optimizer is in
`v000007.state` next to it, which never leaves the aggregator. Fixed tensors are the same in all versions; they are in
the file `fixed`.

Invariant: a file is durable before the event that names it is recorded, so the journal never names a missing file.

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load, save

from thinwire.aggregation import write_model
from thinwire.aggregation.downlink import (
    BUFFERS,
    FIXED,
    FULL,
    Downlink,
    changes_since,
    read_fixed,
    read_version,
)
from thinwire.aggregation.mean import pack_fixed
from thinwire.core.errors import DataLost
from thinwire.core.events import ModelStored, ReplicaStored
from thinwire.core.fleet import Arrival, ClientConnected, Envelope, Hello
from thinwire.core.layout import Layout
from thinwire.core.part_file import damaged_part
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Failure, Fixed, Part, ReplyHeader, State, Vector
from thinwire.server.aggregator import Model
from thinwire.server.state.run_state import RunState

HIDDEN = ".hidden"  # suffix of a version that no event names yet


@dataclass(frozen=True)
class Versions:
    """Holds the files `v000007.model` of one run in its folder."""

    folder: Path
    layout: Layout
    durable: bool = True  # False if nothing of the run outlives its process
    hides: bool = False  # True: a version is hidden until `RoundMode.reveal`
    bundles: set[Path] = field(default_factory=set, compare=False)  # files with changes up to a version, for devices
    _left: dict[str, set[str]] = field(default_factory=dict, compare=False)  # suffix -> stems after the last `prune`

    def path(self, version: int) -> Path:
        """Return the path of a version's file."""
        return self.folder / f"v{version:06d}.model"

    def write(
        self,
        version: int,
        params: Vector,
        buffers: Vector,
        counters: Mapping[str, int],
        at: float,
        state: State | None = None,
    ) -> ModelStored:
        """Make a version durable and return its event; `params` and `buffers` are the flat float32 vectors
        of the layout.
        """
        path, digest_of_state, hidden = self.path(version), "", HIDDEN if self.hides else ""
        if state:
            data = save(state)
            digest_of_state = hashlib.sha256(data).hexdigest()
            write_atomically(path.with_suffix(f".state{hidden}"), data)
        draft = path.with_suffix(f".model{hidden}")
        parts, digest = write_model(draft, self.layout, params, buffers, self.durable)
        return ModelStored(
            at,
            version,
            digest,
            path.name,
            [(p.name, p.length, p.sha256) for p in parts],
            dict(counters),
            digest_of_state,
        )

    def read(self, stored: ModelStored | ReplicaStored) -> tuple[Vector, Vector]:
        """Return (params, buffers) of a version; raise `DataLost` if its file is missing or differs from the record."""
        path = self.folder / stored.file
        return read_version(path, self.layout, stored.version, stored.digest, stored.parts)

    def write_fixed(self, values: Fixed) -> None:
        """Write the fixed tensors for the exported file; without tensors write no file."""
        if data := pack_fixed(values):
            write_atomically(self.folder / FIXED, data)

    def read_fixed(self) -> Fixed:
        """Return the run's fixed tensors; raise `DataLost` if reading fails."""
        return read_fixed(self.folder, self.layout)

    def read_state(self, stored: ModelStored) -> State:
        """Return the server optimizer's state at a version, bit for bit; raise `DataLost` if reading fails."""
        if not stored.state:
            return {}
        path = (self.folder / stored.file).with_suffix(".state")
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != stored.state:
                raise ValueError("its digest is not the one recorded")
            return {name: array.copy() for name, array in load(data).items()}
        except (OSError, ValueError, SafetensorError) as error:
            raise DataLost(
                f"what the server optimizer remembers at version {stored.version} is not readable",
                why=str(error),
                hint='restore a backup, or start again from this model: [run] init = "run:ID"',
            ) from error

    def prune(self, keep: Collection[int] | None, sent: Collection[int] = (), changes: Collection[int] = ()) -> None:
        """Delete the files of all versions except models to `keep`, versions still `sent`, and logged `changes`.

        With `keep=None` all models stay. The first call of a process lists the folder. A later one looks only at what
        the call before it kept, so its time does not grow with the number of versions.

        Invariant: a later call leaves the files of versions that were written since the call before it.
        """
        kept, still_sent, logged = ({self.path(v).stem for v in versions} for versions in (keep or (), sent, changes))
        wanted = {".replica": still_sent, ".change": still_sent | logged}
        if keep is not None:
            wanted |= {".model": kept | still_sent, ".state": kept}
        if not self._left:
            self.bundles.update(self.folder.glob("v*.from*"))
        for path in [path for path in self.bundles if path.stem not in still_sent]:
            path.unlink(missing_ok=True)
            self.bundles.remove(path)
        for suffix, stems in wanted.items():
            left = self._left[suffix] if self._left else {path.stem for path in self.folder.glob(f"v*{suffix}")}
            for stem in left - stems:
                (self.folder / f"{stem}{suffix}").unlink(missing_ok=True)
        self._left.update(wanted)


def parts_of(stored: ModelStored | ReplicaStored) -> tuple[Part, ...]:
    """Return the parts of a stored version."""
    return tuple(Part(name, length, sha256) for name, length, sha256 in stored.parts)


class PlanCache:
    """Holds which devices have the plan of one run.

    A device has the plan if its hello says so, or if it replied to an assignment of this process.
    """

    def __init__(self, plan: Mapping[str, Any], digest: str) -> None:
        self.plan, self.digest = plan, digest
        self._holds_plan: dict[str, bool] = {}  # device -> whether it holds the plan, learned since its hello

    def plan_for(self, device: str, hello: Hello | None) -> Mapping[str, Any] | str:
        """Return the plan for an assignment to this device: the whole plan, or its digest if the device holds it."""
        said = hello is not None and self.digest in hello.plans
        return self.digest if self._holds_plan.get(device, said) else self.plan

    def forget(self, device: str) -> None:
        """Forget whether a device holds the plan; its next hello says it."""
        self._holds_plan.pop(device, None)

    def learn(self, device: str, holds: bool) -> None:
        """Note that a device holds the plan, or that it lacks it."""
        self._holds_plan[device] = holds

    def complete(self, envelope: Envelope) -> Envelope | None:
        """Return the assignment with the whole plan; None if it had that already."""
        if not isinstance(envelope.assignment.plan, str):
            return None
        return replace(envelope, assignment=replace(envelope.assignment, plan=self.plan))


class SentAssignments:
    """Holds the last `most` assignments of each device, which is as many as a device may have at once.

    A device that lacks the plan, or the version that an assignment builds on, gets the same assignment again with the
    whole of it.

    Invariant: an assignment is sent again at most once for each of these reasons, and only to its own device.
    """

    def __init__(self, most: int, plans: PlanCache, models: ModelDistributor | None = None) -> None:
        self._most, self.plans, self.models = most, plans, models
        self._assignments: dict[str, dict[str, Envelope]] = {}  # device -> assignment_id -> assignment

    def remember(self, envelopes: Iterable[Envelope]) -> None:
        """Remember assignments that are sent now, and forget the oldest of each device above `most`."""
        for envelope in envelopes:
            assignments = self._assignments.setdefault(envelope.device, {})
            assignments[envelope.assignment.assignment_id] = envelope
            while len(assignments) > self._most:
                del assignments[next(iter(assignments))]

    def find(self, device: str, assignment_id: str) -> Envelope | None:
        """Return the assignment if this process sent it to the device and it has not failed, otherwise None.

        The fleet delivers such an assignment again by itself.
        """
        return self._assignments.get(device, {}).get(assignment_id)

    def envelope_to_resend(self, arrival: Arrival, restarted: bool) -> Envelope | None:
        """Return the assignment to send again because of this arrival, or None if there is none.

        `restarted`: the arrival is a hello that differs from the device's last one.
        """
        match arrival:
            case ClientConnected(device) if restarted:
                self.plans.forget(device)  # a new process of the device may lack the plan
            case ReplyHeader():
                if self.find(device := arrival.update_id.device, arrival.assignment_id):
                    self.plans.learn(device, holds=True)
                if self.models:
                    self.models.note_reply(device)
            case Failure(kind, _, assignment_id, device):
                if kind == "need-plan":
                    self.plans.learn(device, holds=False)
                sent, rule = self.find(device, assignment_id), self._rule(kind)
                if sent and rule and (again := rule(sent)):
                    self.remember([again])
                    return again
                self._assignments.get(device, {}).pop(assignment_id, None)
        return None

    def _rule(self, kind: str) -> Callable[[Envelope], Envelope | None] | None:
        """Return the function that completes an assignment after a failure of this kind; None if nothing does."""
        if kind == "need-plan":
            return self.plans.complete
        return self.models.complete if self.models and kind == "base-mismatch" else None


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
    """Distributes the model of one run: the whole model, or the compressed changes between versions."""

    def __init__(self, plan: RunPlan, versions: Versions, run_state: RunState, model: Model) -> None:
        self.plan, self.versions, self.run_state, self.model = plan, versions, run_state, model
        self.downlink: Downlink | None = None
        if plan.downlink.compressed:
            replica = versions.read(run_state.bases.replica)[0] if run_state.bases.replica else model.params
            self.downlink = Downlink(model.layout, plan.downlink.codec, replica, run_state.version, plan.run.seed)
        self._full_payload: tuple[ModelStored | ReplicaStored, ModelPayload] | None = None  # cached, by version
        self._lost: set[str] = set()  # devices that lost the version of their last reply
        self._checked = set[Path]()  # bundles whose bytes are known to be right

    def publish(self, version: int, at: float) -> list[ReplicaStored]:
        """Make the new version's compressed change and the replica durable; return the event that names them.

        Return no event if the replica is the model itself.
        """
        if self.downlink is None:
            return []
        self._checked &= self.versions.bundles  # without those that were deleted since
        every = self.plan.downlink.full_every
        news = self.downlink.publish(self.model.params, full=bool(every) and version % every == 0)
        assert news.version == version
        if not news.changes:
            return []
        path = self.versions.path(version)
        change, replica = path.with_suffix(".change"), path.with_suffix(".replica")
        write_atomically(change, b"".join(news.changes))
        rows = [(f"{version}/{i}", len(c), hashlib.sha256(c).hexdigest()) for i, c in enumerate(news.changes)]
        parts, digest = write_model(replica, self.model.layout, self.downlink.replica, self.model.buffers)
        assert digest == news.digest
        full = [(part.name, part.length, part.sha256) for part in parts]
        return [ReplicaStored(at, version, digest, replica.name, full, change.name, rows)]

    def payload_for(self, device: str, but: str = "") -> ModelPayload:
        """Return the parts that bring this device to the newest version, in the smaller of the two forms.

        In a pipelined run the device will have completed its earlier assignments by then. `but` names the new
        assignment, which does not count among them.
        """
        base = self.run_state.bases.newest
        if self.downlink is not None and device not in self._lost:
            held = self.run_state.version_at_delivery(device, but)
            log = {v: self._logged(v) for v in range((held or 0) + 1, base.version + 1)}
            sizes = {version: _size(rows) for version, (_, rows) in log.items() if rows}
            if (versions := changes_since(held, base.version, sizes, _size(base.parts))) is not None:
                return _changes(base, [log[version] for version in versions], held)
        return self.full_payload(base)

    def full_payload(self, base: ModelStored | ReplicaStored) -> ModelPayload:
        """Return a whole version, as its file holds it."""
        if self._full_payload is None or self._full_payload[0] is not base:  # all devices of a round get the same
            self._full_payload = base, ModelPayload(parts_of(base), ((base.file, 0, _size(base.parts)),), base.file)
        return self._full_payload[1]

    def _logged(self, version: int) -> tuple[str, Sequence[Row]]:
        """Return the file of a version's change and its parts; no parts if the change is no longer logged."""
        stored = self.run_state.bases.changes.get(version)
        if stored is None or version <= self.run_state.version - self.plan.downlink.log_rounds:
            return "", ()
        return stored.change, stored.change_parts if (self.versions.folder / stored.change).exists() else ()

    def bundle(self, payload: ModelPayload) -> Path | None:
        """Return the file with the payload's parts one after the other, and write it if need be; None without parts."""
        if not payload.parts:
            return None
        path = self.versions.folder / payload.name
        made = len(payload.pieces) == 1 and payload.pieces[0][0] == payload.name
        if not made and not (path.exists() and path in self._checked):
            if not self._holds(path, payload):  # one of another model may have come with a backup
                self.versions.bundles.add(path)
                write_atomically(path, b"".join(self._read(*piece) for piece in payload.pieces))
            self._checked.add(path)
        return path

    @staticmethod
    def _holds(path: Path, payload: ModelPayload) -> bool:
        """Return True if a bundle of an earlier process has these parts."""
        try:
            with path.open("rb") as file:
                return damaged_part(file, payload.parts) is None and not file.read(1)
        except FileNotFoundError:
            return False

    def _read(self, file: str, start: int, length: int) -> bytes:
        with (self.versions.folder / file).open("rb") as source:
            source.seek(start)
            return source.read(length)

    def complete(self, envelope: Envelope) -> Envelope | None:
        """Return the assignment with the whole model, for a device that lost the version that it builds on.

        Return None if it had the whole model, or if its version is replaced and its round closed.
        """
        assignment, device = envelope.assignment, envelope.device
        if _is_full(assignment.parts):
            return None
        self._lost.add(device)
        if assignment.base_version == self.run_state.version:
            payload = self.payload_for(device)
        elif self.run_state.ledger.pipelined and self.run_state.ledger.is_outstanding(device, assignment.assignment_id):
            payload = self.full_payload(self.run_state.bases.of(assignment.base_version))  # its pipelined round is open
        else:
            return None  # its round is closed, and its version replaced: the next assignment carries the whole model
        return replace(envelope, assignment=replace(assignment, parts=payload.parts), bundle=self.bundle(payload))

    def note_reply(self, device: str) -> None:
        """Note that the device replied, so it holds the version that its reply was made from."""
        self._lost.discard(device)


def _changes(
    base: ModelStored | ReplicaStored, log: Sequence[tuple[str, Sequence[Row]]], held: int | None
) -> ModelPayload:
    """Return a payload of successive changes, followed by the buffers, which exist only in the newest version."""
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
