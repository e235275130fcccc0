"""This module defines the versions of the wire protocol, and reads JSON that strangers send.

An aggregator speaks the newest version and the one before it. A fleet can therefore be updated device by device: first
the aggregator, then the devices. `Range.agreed` finds the version that both ends speak. The committed transcript of a
version (tests/golden/transcripts) is replayed for as long as the version is in `SPOKEN`.

JSON is bounded before it is parsed, because a text that is small on the wire can be large in memory.
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
    """Holds the versions that one end speaks, from `oldest` to `newest`, both included.

    >>> Range(1, 2).agreed(Range(2, 3))
    2
    """

    oldest: int
    newest: int

    def agreed(self, other: Range) -> int:
        """Return the newest version that both ends speak.

        It raises `Refused` if there is none, with both ranges and the end to update.
        """
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


MAX_DEPTH = 8  # the deepest message is a hello: its tasks' codecs are at depth 4
BYTES_A_TOKEN = 8  # bytes of the bound for each value; real messages have at least 12: names, digests, numbers

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def read_json(data: bytes, max_bytes: int) -> Any:
    """Return the value of a JSON text of at most `max_bytes`; raise ValueError if it is not JSON or has too many
    values.

    Invariant: at most `max_bytes / BYTES_A_TOKEN` values, in lists and objects of at most `MAX_DEPTH` levels, are made.
    NaN and Infinity are not JSON.

    >>> read_json(b'{"parts": [1, 2]}', 1000)
    {'parts': [1, 2]}
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON: at most {max_bytes} are read here")
    require_small(data, max_bytes // BYTES_A_TOKEN)
    return json.loads(data.decode(), parse_constant=_refuse)  # decoded here: json.loads would accept UTF-16 too


def require_small(data: bytes, max_tokens: int, max_depth: int = MAX_DEPTH) -> None:
    """Raise ValueError for a JSON text with too many values or levels, before any value of it is made.

    The function counts brackets, commas and colons outside of strings, in a few passes at the speed of memory. This is
    what a parser would see up to the first mistake in the text. A text with a mistake may be refused here for another
    reason.

    >>> require_small(b'["[[[[[[[[[[[["]', 10)
    """
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining '"' begins or ends a string
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
