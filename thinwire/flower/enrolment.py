"""Who may become a device. On a loopback door the first signed hello binds a name to a key and approves both."""

from __future__ import annotations

from typing import Protocol

from thinwire.core.errors import Refused
from thinwire.core.fleet import DeviceRow, Hello, Roster
from thinwire.flower.refusals import Refusal
from thinwire.flower.signing import Identity


class Enrol(Protocol):
    """Makes the row of a key that has none, or raises `Refusal`. It may block: it is called in a thread."""

    def __call__(self, hello: Hello, identity: Identity) -> DeviceRow: ...


def by_loopback(roster: Roster) -> Enrol:
    """Whoever can reach a loopback door runs on this machine already."""

    def enrol(hello: Hello, identity: Identity) -> DeviceRow:
        try:
            return roster.enrol(hello.name, identity.fingerprint, identity.der, "loopback")
        except Refused as refused:
            raise Refusal(409, "name", str(refused)) from refused

    return enrol


def may(row: DeviceRow | None) -> DeviceRow:
    """The row, when its device may call; else 401 (unknown: say hello) or 403."""
    if row is None:
        raise Refusal(401, "hello", "this key is not known here")
    if row.state == "pending":
        raise Refusal(403, "pending", f"{row.name} waits to be approved")
    if row.state == "revoked":
        raise Refusal(403, "revoked", f"{row.name} was revoked")
    return row
