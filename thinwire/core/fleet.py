"""These protocols connect aggregator and devices: `Fleet` at the aggregator, `Link` at the client, `Roster` for access.

Both ends are independent of the network: `flower/` implements them over Flower's SuperLink, `simulation/` in one
process. One conformance suite tests every implementation against the invariants in these docstrings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from thinwire.core.equipment import NOTHING_SAID, Equipment
from thinwire.core.errors import DataLost
from thinwire.core.serialization import ReplyLimit
from thinwire.core.types import (
    PROTOCOL,
    Arrived,
    Assignment,
    Failure,
    PhaseReply,
    Reply,
    ReplyHeader,
    UpdateId,
)

MAX_TENSORS = 64 * 2**10  # characters of all layouts in one hello: about 1000 tensors


@dataclass(frozen=True)
class TaskReport:
    """Holds what a device has installed under a task's name; `error` says why the task is not usable, else it is "".

    `tensors` is the layout's JSON, by which the aggregator names what differs; it is "" if the JSON is too long to
    send.
    """

    name: str
    version: str = ""
    source_digest: str = ""
    layout_digest: str = ""
    codecs: tuple[str, ...] = ()
    error: str = ""
    tensors: str = ""


# Parts of secure aggregation that not every device has: masks at all, keys from ML-KEM, and a pinned roster.
SECURE_PARTS = ("secure", "secure.post_quantum", "secure.malicious")


MAX_POPULATIONS = 1024  # in a device's privacy ledger: a hello reports each of them
MAX_EARLIER_KEYS = 64  # of a device, in the same ledger
MAX_RELEASES = 10**9  # of one report or charge: sums of them stay below 2^63, the largest number of a database
KEY_LETTERS = 16  # of a population's key: two populations of one ledger share one with probability 2^-64


def population_key(population: str) -> str:
    """Return the letters by which a device reports a population: only an aggregator that knows its name has a use.

    >>> population_key("ward")
    '96b8f576c788b75e'
    """
    return hashlib.sha256(population.encode()).hexdigest()[:KEY_LETTERS]


@dataclass(frozen=True)
class Hello:
    """Holds the message by which a client introduces itself when it connects.

    `process` is a random id of each start of the client: the aggregator refuses two running clients of one name. `link`
    holds what the client measured on its connection: `rtt_s` (one round trip) and `skew_s` (how far its clock is
    behind). `trusted_pins` are those of the CAs that the client trusts. `plans` are the digests of the resolved plans
    that it has stored. `has` is the device's equipment. `open_runs` maps the runs whose state the device keeps, and of
    whose end it does not know, to their identities. `secure` is what the device can do of a plan's [secure] table, of
    `SECURE_PARTS`. `booked` are the releases in its own privacy ledger by the `population_key`, and `booked_head` is
    the hash of the ledger's last line: an aggregator that knows of fewer has lost some. `booked_keys` are the
    fingerprints of the device's earlier keys in that ledger, whose spending goes on under the present one.
    """

    name: str
    process: str
    tasks: tuple[TaskReport, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # thinwire, python, torch, ...
    protocol: int = PROTOCOL  # newest protocol version that the client speaks
    oldest: int = PROTOCOL  # oldest protocol version that it speaks
    link: Mapping[str, float] = field(default_factory=dict)
    trusted_pins: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    has: Equipment = NOTHING_SAID
    open_runs: Mapping[str, str] = field(default_factory=dict)
    secure: tuple[str, ...] = ()
    booked: Mapping[str, int] = field(default_factory=dict)
    booked_head: str = ""
    booked_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Welcome:
    """Holds the aggregator's reply to a hello.

    `sequences` has for each active run the highest sequence number that the aggregator received from this device: the
    client continues above it. `name` is the device's name in the roster, so a renamed device learns its new name.
    `runs` maps the active runs to their identities: the client sends updates of these runs only. After the aggregator
    was lost, clients reconnect at random moments within `spread_s` of each other. `cas` are the CA certificates (PEM)
    to trust from now on, none on a device API without TLS. `ended` are those of the hello's `open_runs` that are over
    at this aggregator, which knows them by their identity: another aggregator's run of the same id is not among them.
    """

    name: str
    sequences: Mapping[str, int] = field(default_factory=dict)
    poll_s: float = 25.0
    server_time: float = 0.0
    protocol: int = PROTOCOL  # the version that both speak on this connection
    spread_s: float = 0.0
    cas: tuple[str, ...] = ()
    runs: Mapping[str, str] = field(default_factory=dict)
    ended: tuple[str, ...] = ()


@dataclass(frozen=True)
class Envelope:
    """Holds an assignment, the device that it goes to, and the file of its parts, one after the other."""

    device: str
    assignment: Assignment
    bundle: Path | None = None


@dataclass(frozen=True)
class Delivery:
    """Holds an assignment as a client receives it, and the file of its parts, whose digests are checked already.

    `error` is set if the parts could not be written to the client's disk. `device` is the name that the aggregator uses
    for this device, which may be newer than the hello's; "" if unknown. `header_bytes` is the length of the
    assignment's JSON, by which its memory is counted while it waits. `missed` is True for the stop of a run that ended
    while the device was offline: this process may have had no part in it.
    """

    assignment: Assignment
    bundle: Path | None = None
    download_s: float = 0.0
    error: DataLost | None = None
    device: str = ""
    header_bytes: int = field(default=0, compare=False)
    missed: bool = False


@dataclass(frozen=True)
class ClientConnected:
    """Reports that a device connected."""

    device: str
    hello: Hello


@dataclass(frozen=True)
class ClientDisconnected:
    """Reports that a device is offline; the aggregator had received nothing from it for `silent_s` seconds."""

    device: str
    why: str
    silent_s: float = 0.0


@dataclass(frozen=True)
class Delivered:
    """Reports that an assignment was delivered to its device at wall-clock time `at`.

    After a restart of the aggregator it reports that the device confirmed the assignment. An assignment of kind `stop`
    has no reply, so it is reported only if the device confirms it.
    """

    device: str
    assignment: Assignment
    at: float


Arrival = Reply | ClientConnected | ClientDisconnected


class Fleet(Protocol):
    """Gives the aggregator its only way to reach clients; one thread calls it.

    Invariants:

    - A sent assignment is delivered again after a lost connection, until a reply or a failure for it arrives
      or it is cancelled. It is held in memory only: after a restart of the aggregator the run sends it again.
    - A reply is polled only when all its parts are durable in the spool and their digests match.
    - A reply that was polled and not acknowledged is polled again after a restart.
    - The same `update_id` with another digest never arrives as a reply, but as `Failure("state-lost")`.
    - When `revoke_access` returns, each open assignment of the device is `Failure("refused", "revoked")`, its replies
      that were not polled yet are deleted, and `ClientDisconnected` follows.
    - `ClientDisconnected` also follows if the aggregator has received nothing from a device for `grace` seconds.
    - An assignment that failed may be sent again under its id, to the same process too.
    - To send an id that is in flight replaces that assignment.
    """

    def send(self, assignments: Sequence[Envelope]) -> None:
        """Queue assignments for their devices."""

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        """Return what arrived, after at most `wait_s` seconds."""

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        """Yield the parts of an update in order, one at a time in memory."""

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        """Delete updates from the spool, after the commit that records their outcome."""

    def cancel(self, assignment_ids: Sequence[str]) -> None:
        """Withdraw assignments; it takes effect at the device's next call."""

    def revoke_access(self, devices: Sequence[str]) -> None:
        """Disconnect revoked devices at once: end their calls, delete their uploads and fail their assignments."""

    def drop_uploads(self, run_id: str) -> None:
        """Delete what a run's devices have not sent to the end, and its replies that were not readable."""

    def drop_replies(self, run_id: str) -> None:
        """Delete all replies of a run that is over, and what `drop_uploads` deletes."""

    def delivered(self) -> Sequence[Delivered]:
        """Return the assignments delivered since the last call; without a network only those of kind `stop`."""

    def close(self) -> None:
        """Close all connections and end the threads."""


class Link(Protocol):
    """Gives a client its only way to reach the aggregator; two threads call it: one pulls, one pushes.

    All calls raise `Unreachable` (retry later) or `Refused` (stop). `NotAccepted` concerns one reply only.
    """

    def hello(self, hello: Hello) -> Welcome:
        """Introduce the client, and return the aggregator's reply."""

    def pull(self, wait_s: float) -> Delivery | None:
        """Wait for an assignment; return None after `wait_s` seconds without one."""

    def push(self, reply: Reply, bundle: Path | None = None) -> None:
        """Send a reply with the parts in `bundle`; return when the aggregator has stored all of it durably.

        Invariant: pushing a reply again that the aggregator already has succeeds like the first time.
        """

    def answer(self, reply: PhaseReply | Failure, wait_s: float) -> Delivery | None:
        """Send a message of a secure round's phase, then wait as `pull` does: the pulling thread calls it."""

    def cancelled(self) -> frozenset[str]:
        """Return the ids of assignments that the aggregator has withdrawn."""

    def close(self) -> None:
        """Close the connection."""


DeviceState = Literal["pending", "approved", "revoked"]
How = Literal["loopback", "invitation", "manual", "stock"]


@dataclass(frozen=True)
class DeviceRow:
    """Holds a device in the roster: pending, approved or revoked.

    `fingerprint` is the SHA-256 (hex) of the public key's DER form.
    """

    name: str
    fingerprint: str
    public_key: bytes  # DER SubjectPublicKeyInfo
    state: DeviceState
    how: How
    created_at: float

    @property
    def is_intact(self) -> bool:
        """Return True if the fingerprint matches the key; a damaged row grants no access and stops no other device."""
        return hashlib.sha256(self.public_key).hexdigest() == self.fingerprint

    def standing(self, tls: bool) -> DeviceState:
        """Return the state by which the device API treats the device; with `tls`, loopback alone approves none."""
        return "pending" if tls and self.how == "loopback" and self.state == "approved" else self.state


@dataclass(frozen=True)
class Joining:
    """Holds a device's request to enroll: an invitation's secret, and a key that its signature has proved."""

    secret: str  # 32 hex digits, 128 bits
    name: str
    fingerprint: str
    public_key: bytes  # DER SubjectPublicKeyInfo
    address: str  # of the connection: shown to people, never used for a decision


class Roster(Protocol):
    """Decides which devices may use the device API, at every request; the API's threads call it.

    Invariant: `join` is one transaction, and the same secret with the same key gets the same reply again.
    """

    def rows(self) -> Sequence[DeviceRow]:
        """Return all devices."""

    def by_fingerprint(self, fingerprint: str) -> DeviceRow | None:
        """Return the device with this fingerprint of its key, or None."""

    def enrol(self, name: str, fingerprint: str, public_key: bytes, how: How) -> DeviceRow:
        """Add a device with its key; raise `Refused` if the name is taken."""

    def join(self, joining: Joining) -> DeviceRow:
        """Enroll a device by its invitation.

        It raises `NotInvited`, whose text is for the operator only, and `Refused` if the name is taken, which does not
        use the invitation up.
        """

    def leave(self, name: str) -> None:
        """Revoke a device at its own request."""

    def seen(self, hello: Hello, at: float) -> None:
        """Record a hello and its wall-clock time."""

    def sequences(self, name: str) -> Mapping[str, int]:
        """Return for each active run the highest sequence number received from a device."""

    def runs(self) -> Mapping[str, str]:
        """Return the identities of the active runs, by run id."""

    def ended(self, runs: Mapping[str, str]) -> tuple[str, ...]:
        """Return those of these runs, given with their identities, that this aggregator knows and that are over."""

    def note(self, kind: str, address: str, why: str, name: str = "") -> None:
        """Record a refusal for the operator's log and the dashboard."""


class ReplyLimits(Protocol):
    """Bounds the size of replies; any thread may call it."""

    def of(self, assignment_id: str) -> ReplyLimit:
        """Return the limit of the reply to an assignment."""

    def max_header_bytes(self) -> int:
        """Return the largest header of any reply that may arrive now, before its assignment's id is read."""


@dataclass(frozen=True)
class FixedLimits:
    """Holds one limit for every reply."""

    limit: ReplyLimit

    def of(self, assignment_id: str) -> ReplyLimit:
        """Return the limit."""
        del assignment_id
        return self.limit

    def max_header_bytes(self) -> int:
        """Return the limit's header bytes."""
        return self.limit.header_bytes


class Spool(Protocol):
    """Stores the bodies of replies until their updates are aggregated: `spool/RUN/DEVICE-SEQUENCE`, parts in order."""

    def path(self, update_id: UpdateId) -> Path:
        """Return the file of a reply's parts."""

    def partial(self, update_id: UpdateId, digest: str) -> Path:
        """Return the file of an interrupted upload that can be continued."""

    def drop_partial(self, device: str) -> None:
        """Delete all unfinished uploads of a device."""

    def drop_unused(self, run_id: str, but: Collection[Path] = ()) -> None:
        """Delete a run's unfinished uploads, except for the files `but`, and its replies that were not readable."""

    def draft(self, update_id: UpdateId) -> Path:
        """Return a new file to write a body to, which is not visible yet."""

    def commit(self, draft: Path, header: ReplyHeader, received: bytes = b"") -> None:
        """Make the body and its header durable, then visible.

        `received` are the bytes that the header was read from; they are stored unchanged.
        """

    def header(self, update_id: UpdateId) -> ReplyHeader | None:
        """Return the header of an update, or None if it is not visible."""

    def headers(self) -> Sequence[ReplyHeader]:
        """Return all visible headers, oldest first."""

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        """Yield the parts of an update in order."""

    def delete(self, update_id: UpdateId) -> None:
        """Delete the body and the header of an update."""
