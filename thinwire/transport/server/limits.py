"""Limits on strangers at the device API: unauthenticated connections and failed attempts to join. No I/O."""

from __future__ import annotations

import ipaddress
import json
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

HANDSHAKE_S = 10.0  # for a TLS handshake
HEAD_BYTES, HEAD_S = 16 * 2**10, 10.0  # for a request's line and headers
UNSIGNED_OF_ONE, UNSIGNED_OF_ALL = 32, 512  # unauthenticated connections of one address, and of all
KEPT_FOR_KNOWN = 64  # of UNSIGNED_OF_ALL, reserved for addresses from which a device has signed before
MAX_KNOWN = 16_384  # known addresses: more than the devices that one aggregator serves
FORGOTTEN_S, KEPT_EVERY_S = 30 * 86_400.0, 86_400.0  # when an address is forgotten; how often its time is updated
UNSIGNED_S = 30.0  # after which an unauthenticated connection is closed
BODY_BYTES_A_SECOND, BODY_WINDOW_S = 2**10, 30.0
CONNECTIONS_OF_ONE = 4  # device: a client has two, four while it reconnects; more would let one device delay others
CONNECTIONS_OF_A_GUEST = 16  # of one stock Flower node, which transfers objects on several connections
FAILED_JOINS, FAILED_WITHIN_S = 10, 60.0
REMEMBERED = 65_536  # addresses with failed attempts
MAX_REFUSED_OF_CONNECTION = 3  # refused signatures; an honest device has at most one before it corrects its clock


def neighbourhood(address: str) -> str:
    """Return the prefix that counts as one address: an IPv4 address, or the /64 that a single IPv6 machine gets.

    >>> neighbourhood("2001:db8::1"), neighbourhood("::ffff:192.0.2.1"), neighbourhood("192.0.2.1")
    ('2001:db8::/64', '192.0.2.1', '192.0.2.1')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


@dataclass
class KnownAddresses:
    """The addresses from which a device has signed, and when it last did (seconds since 1970), the latest at the end.

    Their reserved connections stay available while strangers use up the others. Above `MAX_KNOWN` the oldest is
    forgotten.
    """

    at: OrderedDict[str, float] = field(default_factory=OrderedDict)
    changed: bool = False  # since the last `taken`: an address is new, or its time was a day old

    def note(self, address: str, wall: float) -> None:
        """Record that a device signed from this address at the wall-clock time `wall`."""
        near = neighbourhood(address)
        if wall - self.at.get(near, -math.inf) > KEPT_EVERY_S:
            self.changed = True
            self.at[near] = wall
            self.at.move_to_end(near)
            while len(self.at) > MAX_KNOWN:
                self.at.popitem(last=False)

    def holds(self, address: str, wall: float) -> bool:
        """Return True if a device has signed from this address in the last 30 days."""
        return wall - self.at.get(neighbourhood(address), -math.inf) < FORGOTTEN_S

    def taken(self) -> bytes:
        """Return the table as JSON bytes to be stored, and mark it as unchanged."""
        self.changed = False
        return json.dumps(self.at).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> KnownAddresses:
        """Return the table that `taken` gave; raise ValueError if it is invalid."""
        said = json.loads(data)
        if not isinstance(said, dict) or not all(isinstance(wall, float | int) for wall in said.values()):
            raise ValueError("it is no table of addresses")
        newest = sorted(said.items(), key=lambda item: item[1])[-MAX_KNOWN:]
        return cls(OrderedDict((str(near), float(wall)) for near, wall in newest))


C = TypeVar("C")


@dataclass
class UnauthenticatedConnections(Generic[C]):
    """The unauthenticated connections. The oldest ends when one more would be too many.

    Invariant: at most 32 are of one address and 512 of all, at most 448 of these of addresses from which no device has
    signed before.
    """

    _near: dict[C, str] = field(default_factory=dict)  # oldest first, like the two below
    _of: dict[str, dict[C, None]] = field(default_factory=dict)
    _new: dict[C, None] = field(default_factory=dict)  # of addresses from which no device has signed
    turned_away: int = 0

    def came(self, connection: C, address: str, known: bool = False) -> C | None:
        """Add a connection, and return the one that must end for it, or None. It counts until `gone`.

        `known` means that a device has signed from this address before.
        """
        near = neighbourhood(address)
        ended: C | None = None
        if len(of := self._of.get(near, {})) >= UNSIGNED_OF_ONE:
            ended = next(iter(of))
        elif not known and len(self._new) >= UNSIGNED_OF_ALL - KEPT_FOR_KNOWN:
            ended = next(iter(self._new))
        elif len(self._near) >= UNSIGNED_OF_ALL:
            ended = next(iter(self._new or self._near))
        if ended is not None:
            self.turned_away += 1
            self.gone(ended)
        self._near[connection] = near
        self._of.setdefault(near, {})[connection] = None
        if not known:
            self._new[connection] = None
        return ended

    def gone(self, connection: C) -> None:
        """Remove a connection that was closed or authenticated."""
        if (near := self._near.pop(connection, None)) is None:
            return
        self._new.pop(connection, None)
        self._of[near].pop(connection)
        if not self._of[near]:
            del self._of[near]

    def __len__(self) -> int:
        return len(self._near)


@dataclass
class JoinRateLimiter:
    """Limits an address to ten failed joins or refused signatures a minute.

    It must then wait until the oldest failure is a minute old. Failures with the key of a known device (`key`, its
    fingerprint) are counted separately. A stranger behind the same address can thus delay newcomers, but no known
    device.
    """

    _at: OrderedDict[tuple[str, str], deque[float]] = field(default_factory=OrderedDict)

    def wait_s(self, address: str, now: float, key: str = "") -> float:
        """Return the seconds until this address may try again, 0 if it may try now."""
        failed = self._at.get((neighbourhood(address), key))
        if failed is None or len(failed) < FAILED_JOINS:
            return 0.0
        return max(0.0, math.ceil(failed[0] + FAILED_WITHIN_S - now))

    def failed(self, address: str, now: float, key: str = "") -> None:
        """Record a failure of this address at the monotonic time `now`."""
        near = (neighbourhood(address), key)
        self._at.setdefault(near, deque(maxlen=FAILED_JOINS)).append(now)
        self._at.move_to_end(near)
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)
