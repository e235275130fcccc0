"""How much of the door strangers can hold: connections that nobody signed on yet, and joins that failed. No I/O."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

HANDSHAKE_S = 10.0  # of TLS
HEAD_BYTES, HEAD_S = 16 * 2**10, 10.0  # of a request's line and headers
UNSIGNED_OF_ONE, UNSIGNED_OF_ALL = 32, 512
UNSIGNED_S = 30.0  # after which a connection that nobody signed on is closed
BODY_BYTES_A_SECOND, BODY_WINDOW_S = 2**10, 30.0
CONNECTIONS_OF_ONE = 16  # device: ours has four
FAILED_JOINS, FAILED_WITHIN_S = 10, 60.0
REMEMBERED = 65_536  # addresses with failed joins
MAX_REFUSED_OF_CONNECTION = 3  # refused signatures; an honest device has one at most before it signs again


def neighbourhood(address: str) -> str:
    """What counts as one address: an IPv4 one, or the /64 that a single IPv6 machine gets.

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
class Strangers:
    """Connections on which nothing was signed yet. Law: at most 32 of one address and 512 of all are let in."""

    _of: Counter[str] = field(default_factory=Counter)
    turned_away: int = 0

    def admit(self, address: str) -> bool:
        """Whether one more may come; it is counted until `gone`."""
        near = neighbourhood(address)
        if self._of[near] >= UNSIGNED_OF_ONE or self._of.total() >= UNSIGNED_OF_ALL:
            self.turned_away += 1
            if not self._of[near]:
                del self._of[near]
            return False
        self._of[near] += 1
        return True

    def gone(self, address: str) -> None:
        """It was closed, or it is no stranger's any more."""
        near = neighbourhood(address)
        self._of[near] -= 1
        if self._of[near] <= 0:
            del self._of[near]

    def __len__(self) -> int:
        return self._of.total()


@dataclass
class FailedJoins:
    """Ten failed joins or refused signatures a minute and address; then it waits until the oldest is a minute old.

    What is signed with the key of a known device counts by itself (`key`, its fingerprint): a stranger behind the same
    address keeps newcomers waiting, and no device that is known.
    """

    _at: OrderedDict[tuple[str, str], deque[float]] = field(default_factory=OrderedDict)

    def wait_s(self, address: str, now: float, key: str = "") -> float:
        """Seconds until this address may try again; 0: now."""
        failed = self._at.get((neighbourhood(address), key))
        if failed is None or len(failed) < FAILED_JOINS:
            return 0.0
        return max(0.0, math.ceil(failed[0] + FAILED_WITHIN_S - now))

    def failed(self, address: str, now: float, key: str = "") -> None:
        near = (neighbourhood(address), key)
        self._at.setdefault(near, deque(maxlen=FAILED_JOINS)).append(now)
        self._at.move_to_end(near)
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)
