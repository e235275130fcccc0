"""Which versions of the wire there are, and how two ends find one that both speak.

An aggregator speaks the newest and the one before it, so that a fleet is updated device by device: first the
aggregator, then the devices. A version that leaves the table leaves its committed transcript behind
(tests/golden/transcripts), which is replayed for as long as it stands here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


# JSON that strangers send, bounded before it is parsed: small on the wire is not small in memory.


MAX_DEPTH = 8  # the deepest message is a hello: its tasks' codecs stand at depth 4
BYTES_A_TOKEN = 8  # of the bound; honest messages have 12 and more: names, digests, numbers

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def read_json(data: bytes, max_bytes: int) -> Any:
    """Return the value of a JSON text of at most `max_bytes`; ValueError where it is none, or holds too many values.

    Invariant: at most `max_bytes / BYTES_A_TOKEN` values, in lists and objects of at most `MAX_DEPTH` levels, are made.
    NaN and Infinity are no JSON.

    >>> read_json(b'{"parts": [1, 2]}', 1000)
    {'parts': [1, 2]}
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON: at most {max_bytes} are read here")
    require_small(data, max_bytes // BYTES_A_TOKEN)
    return json.loads(data.decode(), parse_constant=_refuse)  # decoded here: json.loads would take UTF-16 too


def require_small(data: bytes, max_tokens: int, max_depth: int = MAX_DEPTH) -> None:
    """ValueError for a JSON text that nests deeper, or holds more values, before anything of it is made.

    It counts what a parser would see up to the first mistake in the text, in a few passes at the speed of memory:
    brackets, commas and colons outside of strings. A text with a mistake may be refused here for another reason.

    >>> require_small(b'["[[[[[[[[[[[["]', 10)
    """
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of '"' begins or ends a string
    if bare.count(b'"') > 2 * max_tokens:
        raise ValueError(f"more than {max_tokens} strings in a message")
    bare = b"".join(bare.split(b'"')[::2])
    if sum(map(bare.count, (b",", b":", b"[", b"{"))) > max_tokens:
        raise ValueError(f"more than {max_tokens} values in a message")
    nested = bare.translate(_BRACKETS, _OTHERS)
    for _ in range(max_depth):
        nested = nested.replace(b"[]", b"")
    if nested:
        raise ValueError(f"lists and objects that are nested deeper than {max_depth}, or not closed")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")
