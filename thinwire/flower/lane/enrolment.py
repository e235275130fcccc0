"""Who may become a device. On a loopback door the first signed hello binds a name to a key and approves both."""

from __future__ import annotations

from typing import Protocol

from thinwire.core.errors import Refused
from thinwire.core.fleet import DeviceRow, Hello, Roster
from thinwire.flower.wire.refusals import Refusal
from thinwire.flower.wire.signing import Identity


class Enrol(Protocol):
    """Makes the row of a key that has none, or raises `Refusal`. It may block: it is called in a thread."""

    def __call__(self, hello: Hello, identity: Identity, /) -> DeviceRow: ...


def by_loopback(roster: Roster) -> Enrol:
    """Whoever can reach a loopback door runs on this machine already."""

    def enrol(hello: Hello, identity: Identity) -> DeviceRow:
        try:
            return roster.enrol(hello.name, identity.fingerprint, identity.der, "loopback")
        except Refused as refused:
            raise Refusal(409, "name", str(refused)) from refused

    return enrol


def welcomes_nobody(_hello: Hello, _identity: Identity) -> DeviceRow:
    """On a door with TLS a row is made by an invitation or by the operator, never by a hello."""
    raise Refusal(401, "unknown", "this key is not known here: join with an invitation")
