"""Which versions of the wire there are, and how two ends find one that both speak.

An aggregator speaks the newest and the one before it, so that a fleet is updated device by device: first the
aggregator, then the devices. A version that leaves the table leaves its committed transcript behind
(tests/flower/golden), which is replayed for as long as it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.core.errors import Refused
from thinwire.core.types import PROTOCOL

SPOKEN: Mapping[int, str] = {
    1: "signed heads, long polls, uploads and downloads that go on where they were cut",
}


@dataclass(frozen=True)
class Range:
    """The versions that one end speaks, both ends included.

    >>> Range(1, 2).agreed(Range(2, 3))
    2
    """

    oldest: int
    newest: int

    def agreed(self, other: Range) -> int:
        """The newest version of both; `Refused` with both ranges and the side to update where there is none."""
        version = min(self.newest, other.newest)
        if version < max(self.oldest, other.oldest):
            behind = "the device" if other.newest < self.oldest else "the aggregator"
            raise Refused(
                f"no version of the protocol is spoken by both: the aggregator speaks {self}, the device {other}",
                why=f"{behind} is older than the other end can still speak to",
                hint=f"update thinwire on {behind}: pip install --upgrade thinwire",
            )
        return version

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SPEAKS = Range(max(min(SPOKEN), PROTOCOL - 1), PROTOCOL)
