"""Which device's process is there now: said hello, calls, holds asks; and when it counts as gone.

Everything here belongs to the door's loop: no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from thinwire.core.clock import Clock
from thinwire.core.fleet import DeviceRow, Hello
from thinwire.core.types import PROTOCOL, Transfer
from thinwire.transport.server.connections import Account, Ledger, Wire


@dataclass
class Session:
    """One live process of a device. `heard_at`: when a request of it came last; `served_at`: when one was answered
    last, which says nothing of the device. `held`: asks that it has and has not answered; `turn` counts its pulls;
    `protocol` is the version that it agreed on in its hello; `key` is its key's fingerprint.
    """

    device: str
    hello: Hello
    heard_at: float
    wire: Wire
    served_at: float = 0.0
    calls: int = 0
    turn: int = 0
    protocol: int = PROTOCOL
    key: str = ""
    held: set[str] = field(default_factory=set)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def connected(self) -> bool:
        return self.calls > 0 or self.wire.open


class Sessions:
    """A device has left when its connection is closed and no call came for `grace_s`, or when it kept its connection
    and no call came for as long as a poll lasts and `grace_s` more, but at the latest when it was not heard for two
    polls. A pull that waits here is not heard again when it is answered: a frozen process reads no answer.
    """

    def __init__(
        self, clock: Clock, grace_s: float, poll_s: float, left: Callable[[str, str, float], None], ledger: Ledger
    ) -> None:  # fmt: skip
        self._clock, self._grace_s, self._poll_s, self._left = clock, grace_s, poll_s, left
        self._now: dict[str, Session] = {}
        self._ledger, self._accounts = ledger, dict[str, Account]()

    def of(self, device: str) -> Session | None:
        return self._now.get(device)

    def shut_out(self, device: str) -> None:
        """Nobody of this name is there: who waits is woken, and finds that."""
        if session := self._now.pop(device, None):
            session.turn += 1
            session.woken.set()

    def greet_again(self) -> None:
        """Have everybody say hello at the next pull; nobody has left."""
        for device in list(self._now):
            self.shut_out(device)

    def renamed(self, rows: Iterable[DeviceRow]) -> None:
        """Whoever is there by another name than its key's row has now has left by that one: its pull is answered, and
        it says hello by the new one.
        """
        names = {row.fingerprint: row.name for row in rows}
        for session in list(self._now.values()):
            if (name := names.get(session.key, session.device)) != session.device:
                self._gone(session, f"it is called {name} now", self._clock.now() - session.heard_at)

    def begin(self, hello: Hello, wire: Wire, protocol: int = PROTOCOL, key: str = "") -> bool:
        """A process is there; False when it was there already and says nothing else than before."""
        old = self._now.get(hello.name)
        if old is not None and old.hello.process == hello.process:
            before, old.hello, old.heard_at = old.hello, hello, self._clock.now()
            old.served_at = old.heard_at
            old.protocol = protocol
            self.listen(old, wire)
            return (before.tasks, before.versions, before.has) != (hello.tasks, hello.versions, hello.has)
        if old is not None:
            old.turn += 1
            old.woken.set()
        now = self._clock.now()
        session = Session(hello.name, hello, now, wire, now, protocol=protocol, key=key)
        self._now[hello.name] = session
        self.listen(session, wire)
        return True

    def listen(self, session: Session, wire: Wire) -> None:
        """This is the connection whose end we shall hear of."""
        session.wire, wire.on_close = wire, session.woken.set

    @contextmanager
    def call(self, device: str, waits: bool = False) -> Iterator[None]:
        """While a device is being served it cannot be gone. It is heard until the end, but for a call that `waits`."""
        session = self._now.get(device)
        if session is None:
            yield
            return
        session.calls += 1
        session.heard_at = self._clock.now()
        try:
            yield
        finally:
            session.calls -= 1
            session.served_at = self._clock.now()
            if not waits:
                session.heard_at = session.served_at

    def wake(self, devices: Iterable[str]) -> None:
        for device in devices:
            if session := self._now.get(device):
                session.woken.set()

    def wake_all(self) -> None:
        self.wake(list(self._now))

    def sweep(self) -> None:
        """Say who has left since the last sweep."""
        now = self._clock.now()
        for session in list(self._now.values()):
            silent_s, unserved_s = now - session.heard_at, now - session.served_at
            if session.calls:
                continue
            if not session.wire.open and min(silent_s, unserved_s) > self._grace_s:
                self._gone(session, "its connection is closed", silent_s)
            elif silent_s > 2 * self._poll_s or min(silent_s, unserved_s) > self._poll_s + self._grace_s:
                self._gone(session, f"it has not called for {silent_s:.0f} s", silent_s)

    def heard(self) -> dict[str, float]:
        """When each device that is there was heard last, on the clock that only runs forward."""
        return {name: session.heard_at for name, session in self._now.items()}

    def account(self, device: str) -> Account:
        if device not in self._accounts:
            self._accounts[device] = Account(self._ledger.of(device))
        return self._accounts[device]

    def told(self, device: str, transfer: Transfer) -> None:
        """What its account gave of the wire (`untold`) is in an answer: the next process does not tell it again."""
        self.account(device).durable((transfer.sent_bytes or 0, transfer.received_bytes or 0, transfer.requests))
        self._ledger.keep(device)

    def keep(self) -> None:
        """Have what was counted of the wire outlive this process."""
        self._ledger.keep()

    def total(self) -> tuple[int, int]:
        """Bytes sent and received, of all devices together."""
        every = self._accounts.values()
        return sum(account.sent_bytes for account in every), sum(account.received_bytes for account in every)

    def _gone(self, session: Session, why: str, silent_s: float) -> None:
        del self._now[session.device]
        session.turn += 1
        session.woken.set()
        self._left(session.device, why, silent_s)
