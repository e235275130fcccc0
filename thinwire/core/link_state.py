"""The table of online devices and of assignments in flight, as the HTTPS transport reaches it.

`LinkState` is Flower's word for the table of a SuperLink: which nodes are registered, which are online, and which
messages are in flight. `thinwire/flower` implements it as a subclass of Flower's own class; `transport/` knows this
Protocol only. It is memory: at a start the device registry and the journal fill it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from thinwire.core.fleet import Envelope
from thinwire.core.serialization import assignment_to_bytes

POLL_S = 120.0  # of a pull, which is the heartbeat. 60 s would cost 1.5 MB a day (benchmarks/device_api.py)
SUSPECT_S = POLL_S + 10.0  # of silence, after which a device has missed a pull; it is offline if it stays silent


def presence(online: bool, last_seen_at: float | None, now: float) -> Literal["online", "suspect", "offline"]:
    """Return what is said of a device everywhere, from its last contact; only a running aggregator knows `online`.

    >>> presence(True, 100.0, 200.0), presence(True, 100.0, 231.0), presence(False, 100.0, 101.0)
    ('online', 'suspect', 'offline')
    """
    if not online:
        return "offline"
    return "suspect" if last_seen_at is not None and now - last_seen_at > SUSPECT_S else "online"


@dataclass(eq=False)
class Outstanding:
    """An assignment in flight: it was sent, and no reply to it has arrived.

    `data` is the encoded assignment. `pulled_at` is the wall clock at the last pull, 0 before the first one.
    `is_delivered` is True once the delivery was reported to the fleet.
    """

    envelope: Envelope
    data: bytes
    pulled_at: float = 0.0
    is_delivered: bool = False

    @property
    def assignment_id(self) -> str:
        """Return the id of the assignment, which is the id of its message."""
        return self.envelope.assignment.assignment_id

    @property
    def length(self) -> int:
        """Return the length of the assignment's parts in bytes."""
        return sum(part.length for part in self.envelope.assignment.parts)

    def spoken(self, protocol: int) -> bytes:
        """Return the assignment encoded for one client, with the protocol version that was negotiated.

        A client rejects a newer one.
        """
        assignment = self.envelope.assignment
        return (
            self.data
            if assignment.protocol <= protocol
            else assignment_to_bytes(replace(assignment, protocol=protocol))
        )


class LinkState(Protocol):
    """Holds the devices of the aggregator by key, which of them are online, and the assignments in flight.

    All threads of the process share it; it locks itself. Names are those of devices, ids those of assignments.

    Invariants:

    - There is no other table of online devices or of assignments by device in the process.
    - An assignment is outstanding until a reply to it is stored or it is removed, whatever happens to connections.
    - A reply stays until it is collected.
    """

    def register(self, device: str, public_key: bytes) -> None:
        """Enter a device by its public key (DER); the same key under another name is the same node."""

    def knows(self, device: str) -> bool:
        """Return True if a device of this name is registered."""

    def devices(self) -> list[str]:
        """Return the names of all registered devices."""

    def names_of(self, public_key: bytes) -> list[str]:
        """Return the names under which this key was registered since the start."""

    def forget(self, device: str) -> bool:
        """Set a revoked device offline and remove its name; return False if it was not registered."""

    def set_online(self, device: str) -> None:
        """Set a registered device online, until `set_offline`."""

    def set_offline(self, device: str) -> None:
        """Set a device offline."""

    def online(self) -> set[str]:
        """Return the names of the devices that are online."""

    def watch(self, wake: Callable[[Iterable[str]], None]) -> None:
        """Have `wake` called with the names of devices for which something changed."""

    def wake(self, devices: Iterable[str]) -> None:
        """Report that something changed for these devices."""

    def store(self, outstanding: Outstanding) -> None:
        """Put an assignment in flight to a registered device; it replaces an earlier one of the same id."""

    def outstanding(self, device: str) -> list[Outstanding]:
        """Return the assignments in flight to a device, in the order sent."""

    def find(self, device: str, assignment_id: str) -> Outstanding | None:
        """Return an assignment in flight to this device, or None."""

    def device_of(self, assignment_id: str) -> str:
        """Return the device to which an assignment is in flight, "" if it is not in flight."""

    def deliver(self, outstanding: Outstanding, at: float) -> None:
        """Record that an assignment was sent to its device at the wall-clock time `at`; it stays in flight."""

    def set_held(self, device: str, assignment_ids: Collection[str]) -> None:
        """Record the ids of the assignments that the device's client reports to have."""

    def held(self, device: str) -> set[str]:
        """Return the ids that the device's client reported last and has not replied to."""

    def release(self, device: str, assignment_id: str) -> None:
        """Remove an id from the held ones, because its reply is here: sent again, it is delivered again."""

    def next_for(self, device: str) -> Outstanding | None:
        """Return the oldest assignment in flight that the device's client does not have, or None."""

    def reply(self, outstanding: Outstanding, data: bytes) -> Any:
        """Store the reply to an assignment in flight, which ends its flight; return the reply's handle."""

    def collect(self, replies: Sequence[Any]) -> None:
        """Remove replies and their assignments."""

    def remove(self, outstanding: Outstanding) -> None:
        """Remove an assignment that gets no reply."""

    def in_flight(self) -> set[str]:
        """Return the ids of all assignments whose reply was not collected."""
