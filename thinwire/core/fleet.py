"""How an aggregator reaches its devices (Fleet), how a device reaches its aggregator (Link), and who may (Roster).

Neither end knows a network: `flower/` gives both over Flower's SuperLink, `simulation/` in process, and one
conformance suite holds them to these texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from thinwire.core.errors import DataLost
from thinwire.core.serialization import ReplyLimit
from thinwire.core.types import NOTHING_SAID, PROTOCOL, Arrived, Ask, Equipment, Failure, ReplyHead, UpdateId

MAX_TENSORS = 64 * 2**10  # letters of the layouts in one hello: some 1000 tensors


@dataclass(frozen=True)
class TaskReport:
    """What a device has installed under a task's name. `error` says why it cannot be used, else it is empty.

    `tensors` is the layout's JSON, by which an aggregator names what differs; "" where it is long.
    """

    name: str
    version: str = ""
    source_digest: str = ""
    layout_digest: str = ""
    codecs: tuple[str, ...] = ()
    error: str = ""
    tensors: str = ""


@dataclass(frozen=True)
class Hello:
    """A device's first words. `process` is drawn anew at each start: two live ones of one name are refused.

    `link` is what it measured on its way here: `rtt_s` (one round trip) and `skew_s` (how far its clock is behind).
    `holds` are the pins of the CAs that it trusts; `plans` the digests of the resolved plans that it keeps; `has` is
    what there is of memory, power and the like.
    """

    name: str
    process: str
    tasks: tuple[TaskReport, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # thinwire, python, torch, ...
    protocol: int = PROTOCOL  # the newest that it speaks
    oldest: int = PROTOCOL  # and the oldest
    link: Mapping[str, float] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    has: Equipment = NOTHING_SAID


@dataclass(frozen=True)
class Welcome:
    """The answer: the highest sequence seen from this device for each run that goes on (it goes on above it).

    `name` is the row's: a device that was renamed learns it here. `runs` are the identities of the runs that go on: a
    device sends what it made for them, and nothing that it made for others. After a lost aggregator devices come back
    within `spread_s` of each other. `cas` are the certificates (PEM) to hold from now on, none on a door without TLS.
    """

    name: str
    sequences: Mapping[str, int] = field(default_factory=dict)
    poll_s: float = 25.0
    server_time: float = 0.0
    protocol: int = PROTOCOL  # the one that both speak from here on
    spread_s: float = 0.0
    cas: tuple[str, ...] = ()
    runs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Envelope:
    """An ask, the device it goes to, and the file in which its parts stand one after the other."""

    device: str
    ask: Ask
    bundle: Path | None = None


@dataclass(frozen=True)
class Delivery:
    """An ask as a device gets it, with the file that its parts were streamed to (digests already checked).

    `error`: why there is none, where this device's disk could not take it. `device`: what the aggregator calls this
    device, which it may have renamed since the hello; "" where it does not say. `head_bytes`: the length of the ask's
    JSON, by which its memory is counted while it waits.
    """

    ask: Ask
    bundle: Path | None = None
    download_s: float = 0.0
    error: DataLost | None = None
    device: str = ""
    head_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class NodeJoined:
    device: str
    hello: Hello


@dataclass(frozen=True)
class NodeLeft:
    """A device is not there any more; nothing was heard of it for `silent_s` before."""

    device: str
    why: str
    silent_s: float = 0.0


@dataclass(frozen=True)
class TakenUp:
    """An ask was handed to its device, or, after a restart, the device says that it holds it; `at`: wall clock. Of a
    stop, to which there is no answer, only when the device says so.
    """

    device: str
    ask: Ask
    at: float


Arrival = ReplyHead | Failure | NodeJoined | NodeLeft


class Fleet(Protocol):
    """The only way to reach clients. One thread calls it.

    Laws: an ask that was sent is delivered again after a lost connection, until a head or a failure for it arrives
    or it is cancelled; a head is polled only when all its parts are durable in the spool and their digests match;
    a head polled and not acked comes again after a restart; the same update_id with another digest never arrives
    as a head but as Failure("state-lost"); when `shut_out` returns each open ask of the device is Failure("refused",
    "revoked"), what it sent and nobody polled is gone, and NodeLeft follows; NodeLeft comes too for a device that has
    not been heard of for `grace`; an ask that failed may be sent again under its id, to the same process too.
    """

    def send(self, asks: Sequence[Envelope]) -> None: ...
    def poll(self, wait_s: float) -> Sequence[Arrival]: ...
    def open(self, update_id: UpdateId) -> Iterator[Arrived]: ...  # its parts in order, one at a time in memory
    def ack(self, update_ids: Sequence[UpdateId]) -> None: ...  # after the commit
    def cancel(self, ask_ids: Sequence[str]) -> None: ...  # takes effect at the device's next call
    def shut_out(self, devices: Sequence[str]) -> None: ...  # now: calls answered, uploads gone, asks refused
    def taken_up(self) -> Sequence[TakenUp]: ...  # since the last call; where answers come at once stops alone
    def close(self) -> None: ...


class Link(Protocol):
    """A device's end. Two threads call it: one keeps a pull open, one pushes.

    `pull` waits until an ask is there and returns None after `wait_s` without one. `push` returns when the other
    end holds everything durably; a push of what it has already is answered as the first was. All three raise
    `Unreachable` (try again later) or `Refused` (stop); `NotTaken` is of one reply alone.
    """

    def hello(self, hello: Hello) -> Welcome: ...
    def pull(self, wait_s: float) -> Delivery | None: ...
    def push(self, reply: ReplyHead | Failure, bundle: Path | None = None) -> None: ...
    def cancelled(self) -> frozenset[str]: ...  # ask_ids that the aggregator has withdrawn
    def close(self) -> None: ...


DeviceState = Literal["pending", "approved", "revoked"]
How = Literal["loopback", "invitation", "manual", "stock"]


@dataclass(frozen=True)
class DeviceRow:
    """A device that may, might or may no longer reach us. `fingerprint`: SHA-256 (hex) of the DER public key."""

    name: str
    fingerprint: str
    public_key: bytes  # DER SubjectPublicKeyInfo
    state: DeviceState
    how: How
    created_at: float

    @property
    def is_intact(self) -> bool:
        """Whether the key is the one that the fingerprint names: a damaged row lets nobody in and stops nothing."""
        return hashlib.sha256(self.public_key).hexdigest() == self.fingerprint


@dataclass(frozen=True)
class Joining:
    """What a device that wants in has shown: an invitation's secret, and by its signature that the key is its own."""

    secret: str  # 32 hex digits, 128 bits
    name: str
    fingerprint: str
    public_key: bytes  # DER SubjectPublicKeyInfo
    address: str  # where the connection came from; for people to read, never to decide by


class Roster(Protocol):
    """Who may reach the door: kept in the store, read at every request, called from the door's threads.

    `join` is one transaction: the same secret with the same key is answered as the first time. It raises
    `NotInvited` (whose text is for the operator alone), and `Refused` for a name that is taken, which uses nothing up.
    """

    def rows(self) -> Sequence[DeviceRow]: ...
    def by_fingerprint(self, fingerprint: str) -> DeviceRow | None: ...
    def enrol(self, name: str, fingerprint: str, public_key: bytes, how: How) -> DeviceRow: ...  # Refused: name taken
    def join(self, joining: Joining) -> DeviceRow: ...
    def leave(self, name: str) -> None: ...  # the device shuts itself out
    def seen(self, hello: Hello, at: float) -> None: ...
    def sequences(self, name: str) -> Mapping[str, int]: ...
    def runs(self) -> Mapping[str, str]: ...  # those that go on -> their identities
    def note(self, kind: str, address: str, why: str, name: str = "") -> None: ...  # for the operator's log and page


class ReplyLimits(Protocol):
    """How large the replies to asks may be. Any thread may call it."""

    def of(self, ask_id: str) -> ReplyLimit: ...
    def max_header_bytes(self) -> int: ...  # of any reply that may come now: which ask it is for is not read yet


@dataclass(frozen=True)
class FixedLimits:
    """One limit for every reply."""

    limit: ReplyLimit

    def of(self, ask_id: str) -> ReplyLimit:
        del ask_id
        return self.limit

    def max_header_bytes(self) -> int:
        return self.limit.header_bytes


class Spool(Protocol):
    """Where bodies of answers lie until they are folded: `spool/RUN/DEVICE-SEQUENCE`, parts one after the other.

    `received` are the bytes that a head was read from: they are kept as they came, and never written anew.
    """

    def path(self, update_id: UpdateId) -> Path: ...
    def partial(self, update_id: UpdateId, digest: str) -> Path: ...  # the file of an upload that may be cut and go on
    def drop_partial(self, device: str) -> None: ...  # all that this device was uploading
    def draft(self, update_id: UpdateId) -> Path: ...  # a new file to stream to, not visible yet
    def commit(self, draft: Path, head: ReplyHead, received: bytes = b"") -> None: ...  # fsync both, then visible
    def head(self, update_id: UpdateId) -> ReplyHead | None: ...
    def heads(self) -> Sequence[ReplyHead]: ...  # all that are visible, oldest first
    def open(self, update_id: UpdateId) -> Iterator[Arrived]: ...
    def delete(self, update_id: UpdateId) -> None: ...
