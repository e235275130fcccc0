"""Presence of devices: the connection of each online device, and when a device is offline.

Which devices are online is said by the table of core/link_state.py, which is Flower's; this module keeps it.
All of it belongs to the event loop of the device API, so there are no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from thinwire.core.clock import Clock
from thinwire.core.fleet import DeviceRow, Hello
from thinwire.core.link_state import LinkState
from thinwire.core.types import PROTOCOL
from thinwire.transport.server.connections import Connection, TrafficCounter


@dataclass
class DeviceConnection:
    """Holds a live process of a device.

    `last_seen_at` is the time of its last request. `served_at` is the time of the last response, which proves nothing
    about the device. Both are monotonic seconds. `calls` counts its requests in progress. A waiting pull ends when
    `pull_epoch` changes, as at the next pull. `protocol` is the version negotiated at registration, `key` the
    fingerprint of its key. `must_register` is True if it must register again before its next pull. `woken` is set when
    a waiting pull must look again.
    """

    device: str
    hello: Hello
    last_seen_at: float
    wire: Connection
    served_at: float = 0.0
    calls: int = 0
    pull_epoch: int = 0
    protocol: int = PROTOCOL
    key: str = ""
    must_register: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def connected(self) -> bool:
        """Return True while a request is in progress or the connection is open."""
        return self.calls > 0 or self.wire.open


class Presence:
    """The live processes of all devices, by name of the device, and their byte counts.

    A device goes offline in one of three cases:

    - its connection is closed, and no request came for `grace_s`;
    - its connection is open, but no request came for `poll_s + grace_s`, counted from its last request or response;
    - no request came for two polls, whatever was sent to it.

    A response to a waiting pull is no sign of life: a frozen process reads no response. `on_offline` is called with the
    name of the device, the reason, and the seconds of silence.

    Invariant: a device is online in `state` exactly while it has a live process here.
    """

    def __init__(
        self,
        state: LinkState,
        clock: Clock,
        grace_s: float,
        poll_s: float,
        on_offline: Callable[[str, str, float], None],
    ) -> None:
        self._state = state
        self.poll_s = poll_s
        self._clock, self._grace_s, self._on_offline = clock, grace_s, on_offline
        self._online: dict[str, DeviceConnection] = {}
        self._accounts: dict[str, TrafficCounter] = {}

    def of(self, device: str) -> DeviceConnection | None:
        """Return the live process of a device, or None."""
        return self._online.get(device)

    def revoke_access(self, device: str) -> None:
        """Remove the process of a device, and wake its waiting pull, which then finds out."""
        if connection := self._online.pop(device, None):
            self._state.set_offline(device)
            connection.pull_epoch += 1
            connection.woken.set()

    def require_registration(self) -> None:
        """Make every device register again at its next pull, without reporting it as offline."""
        for connection in self._online.values():
            connection.must_register = True
            connection.pull_epoch += 1
            connection.woken.set()

    def renamed(self, rows: Iterable[DeviceRow]) -> None:
        """Take every process offline whose device was renamed.

        Its pull is answered, and it registers again under the new name of its key's row.
        """
        names = {row.fingerprint: row.name for row in rows}
        for connection in list(self._online.values()):
            if (name := names.get(connection.key, connection.device)) != connection.device:
                self._take_offline(connection, f"it is called {name} now", self._clock.now() - connection.last_seen_at)

    def begin(self, hello: Hello, wire: Connection, protocol: int = PROTOCOL, key: str = "") -> bool:
        """Register a process of a device; return False if it was registered before and reports nothing new."""
        old = self._online.get(hello.name)
        if old is not None and old.hello.process == hello.process:
            before, old.hello, old.last_seen_at = old.hello, hello, self._clock.now()
            old.served_at = old.last_seen_at
            old.protocol, old.must_register = protocol, False
            self.listen(old, wire)
            return (before.tasks, before.versions, before.has) != (hello.tasks, hello.versions, hello.has)
        if old is not None:
            old.pull_epoch += 1
            old.woken.set()
        now = self._clock.now()
        connection = DeviceConnection(hello.name, hello, now, wire, now, protocol=protocol, key=key)
        self._online[hello.name] = connection
        self._state.set_held(hello.name, ())
        self._state.set_online(hello.name)
        self.listen(connection, wire)
        return True

    def listen(self, connection: DeviceConnection, wire: Connection) -> None:
        """Make `wire` the connection whose end wakes the process's pull."""
        connection.wire, wire.on_close = wire, connection.woken.set

    @contextmanager
    def call(self, device: str, waits: bool = False) -> Iterator[None]:
        """Keep a device online while one of its requests is served.

        The end of the request counts as a sign of life, unless the request is a pull that `waits`.
        """
        connection = self._online.get(device)
        if connection is None:
            yield
            return
        connection.calls += 1
        connection.last_seen_at = self._clock.now()
        try:
            yield
        finally:
            connection.calls -= 1
            connection.served_at = self._clock.now()
            if not waits:
                connection.last_seen_at = connection.served_at

    def wake(self, devices: Iterable[str]) -> None:
        """Wake the waiting pulls of these devices."""
        for device in devices:
            if connection := self._online.get(device):
                connection.woken.set()

    def wake_all(self) -> None:
        """Wake the waiting pulls of all devices."""
        self.wake(list(self._online))

    def sweep(self) -> None:
        """Take devices offline that were silent for too long, and report each of them."""
        now = self._clock.now()
        for connection in list(self._online.values()):
            silent_s, unserved_s = now - connection.last_seen_at, now - connection.served_at
            if connection.calls:
                continue
            if not connection.wire.open and min(silent_s, unserved_s) > self._grace_s:
                self._take_offline(connection, "its connection is closed", silent_s)
            elif silent_s > 2 * self.poll_s or min(silent_s, unserved_s) > self.poll_s + self._grace_s:
                self._take_offline(connection, f"it has not called for {silent_s:.0f} s", silent_s)

    def last_seen(self) -> dict[str, float]:
        """Return the monotonic time of the last request of each device that is online."""
        return {name: connection.last_seen_at for name, connection in self._online.items()}

    def account(self, device: str) -> TrafficCounter:
        """Return the byte counts of a device, also of one that is offline."""
        return self._accounts.setdefault(device, TrafficCounter())

    def total(self) -> tuple[int, int]:
        """Return the bytes sent and received by the aggregator, over all devices."""
        every = self._accounts.values()
        return sum(account.sent_bytes for account in every), sum(account.received_bytes for account in every)

    def _take_offline(self, connection: DeviceConnection, why: str, silent_s: float) -> None:
        del self._online[connection.device]
        self._state.set_offline(connection.device)
        connection.pull_epoch += 1
        connection.woken.set()
        self._on_offline(connection.device, why, silent_s)
