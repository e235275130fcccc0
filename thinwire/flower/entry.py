"""The check that every request passes: signed by a key that the roster approves at this moment, and made once."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.clock import Clock
from thinwire.core.fleet import DeviceRow, Roster
from thinwire.flower.enrolment import may
from thinwire.flower.requests import Request
from thinwire.flower.sessions import Sessions
from thinwire.flower.signing import Identity, Verifier, claimed_identity


class Entry:
    """`on_call` hears of every device that was let in."""

    def __init__(
        self, roster: Roster, sessions: Sessions, verifier: Verifier, clock: Clock, on_call: Callable[[DeviceRow], None]
    ) -> None:
        self._roster, self._sessions, self._verifier, self._clock = roster, sessions, verifier, clock
        self._on_call = on_call

    def known(self, request: Request) -> None:
        """Refuse whose key may not call before anything of the body is read. Nothing is proved yet."""
        may(self.row(claimed_identity(request.headers)))

    def row(self, identity: Identity) -> DeviceRow | None:
        return self._roster.by_fingerprint(identity.fingerprint)

    def signer(self, request: Request, head: bytes) -> Identity:
        """Who signed this request."""
        return self._verifier.check(request.method, request.path, head, request.headers, self._clock.wall())

    def enter(self, request: Request, identity: Identity, row: DeviceRow) -> DeviceRow:
        """Let the device in: its nonce is spent, and from now on it answers for the connection's bytes."""
        self._verifier.spend(identity, request.headers, self._clock.wall())
        account = self._sessions.account(row.name)
        account.requests += 1
        request.wire.belongs_to(account)
        self._on_call(row)
        return row

    def still(self, row: DeviceRow) -> None:
        """Refuse a device that was shut out while it waited."""
        may(self._roster.by_fingerprint(row.fingerprint))

    def admit(self, request: Request, head: bytes) -> DeviceRow:
        """All of it, for a device that has a row."""
        identity = self.signer(request, head)
        return self.enter(request, identity, may(self.row(identity)))
