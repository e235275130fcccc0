"""How the lane puts JSON and parts into one body: blocks of a 4-byte little-endian length and that many bytes.

hello, join: [JSON]. pull: [JSON] up; [control JSON] [ask, maybe empty] parts.. down. push: [head] parts.. up. Parts of
more than `INLINE_BYTES` together travel apart, where a cut can be gone on from (flower/lane/: bundle.py, uploads.py).
A block of JSON is deflated (RFC 1951) against words that both ends know: a head is then little more than its digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from thinwire.core.formatting import plain
from thinwire.core.serialization import MAX_HEAD_BYTES
from thinwire.core.types import Part

LENGTH = struct.Struct("<I")
INLINE_BYTES = 256 * 2**10
STREAM_BYTES = 2**20  # read, hashed and written at once
LEVEL = 6

# What heads have in common, the most frequent last (RFC 1951 finds near words cheaper). It belongs to protocol 1.
WORDS = (
    b'{"process":"","wait_s":24.0,"held":["1."]}{"cancelled":[]}{"name":"","process":"","tasks":[{"name":"","version":"'
    b'","source_digest":"","layout_digest":"","codecs":["identity","fp16","int8","topk"],"error":""}],"versions":{"'
    b'thinwire":"0.","python":"3.1","torch":"2.","machine":"x86_64","system":"Linux"},"protocol":1,"oldest":1,"link":{"'
    b'rtt_s":0.0,"skew_s":0.0},"holds":[""],"plans":[""]}{"name":"","sequences":{"},"poll_s":240.0,"server_time":17,"'
    b'protocol":1,"spread_s":0.0,"cas":[]}{"kind":"task-error","text":"","ask_id":"","device":"","protocol":1,"'
    b'transfer":null,"type":"failure"}{"ask_id":"-1.1.","update_id":"-1//1","base_version":1,"examples":1,"steps":1,"a'
    b'":1.0,"norm":0.0,"metrics":{"eval/loss":[0.0,1.0],"eval/accuracy":[0.0,1.0],"train/loss":[0.0,1.0]},"timings":{"'
    b'download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":0.0,"encode_s":0.0},"parts":[{"name":"frame/0","length"'
    b':1,"sha256":"","offset":0},{"name":"buffers","length":1,"sha256":""}],"codec":"topk(0.01) > int8 > zstd","'
    b'counters":{},"residual_norm":0.0,"protocol":1,"transfer":null,"type":"reply"}{"ask_id":"-1.1.","run":"-1","task":'
    b'"","kind":"evaluate","kind":"train","plan":"","round":1,"base_version":1,"base_digest":"","layout_digest":"","'
    b'codec":"topk(0.01) > int8 > zstd","work":{"steps":0,"batch":32},"deadline_s":60.0,"parts":[{"name":"full/0","'
    b'length":1,"sha256":"","offset":0}],"vectors":[],"verdicts":[{"update_id":"-1//1","outcome":"dropped","version":1}'
    b',{"update_id":"-1//1","outcome":"folded","version":1}],"protocol":1}'
)


def block(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def packed(json: bytes) -> bytes:
    """A block of JSON, deflated."""
    deflate = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS, zdict=WORDS)
    return block(deflate.compress(json) + deflate.flush())


def inflated(data: bytes, most: int) -> bytes:
    """The JSON of a block; ValueError where it is damaged or longer than `most` bytes: never more than that is made.

    >>> inflated(packed(b'{"round":1}')[4:], 100)
    b'{"round":1}'
    """
    inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS, zdict=WORDS)
    try:
        found = inflate.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"a block cannot be read: {error}") from error
    if len(found) > most:
        raise ValueError(f"a block of more than {most} bytes")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("a block is cut short, or more follows in it")
    return found


def unblock(data: bytes) -> tuple[bytes, memoryview]:
    """The first block, and what follows it; ValueError where it is cut short."""
    if len(data) < LENGTH.size:
        raise ValueError("a body without a block")
    (length,) = LENGTH.unpack_from(data)
    if LENGTH.size + length > len(data):
        raise ValueError("a block is longer than its body")
    return data[LENGTH.size : LENGTH.size + length], memoryview(data)[LENGTH.size + length :]


def etag(parts: Sequence[Part]) -> str:
    """What the parts are, one after the other: the same for every ask that carries them."""
    return '"' + hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest() + '"'


# The paths that exist: which method, how long a body may be, and which parts of the path are names.


Who = Literal["anyone", "stranger", "newcomer", "device"]
RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
HELLO, PULL, PUSH = "/tw/v1/hello", "/tw/v1/pull", "/tw/v1/push"
CA, JOIN, LEAVE = "/tw/v1/ca", "/tw/v1/join", "/tw/v1/leave"


@dataclass(frozen=True)
class Route:
    """`who` may call: anyone (unsigned), a stranger (any key that signed), a newcomer (one that the door may enrol), or
    only a device that has a row.
    """

    name: str
    method: str
    path: re.Pattern[str]
    who: Who
    most_bytes: int = 0

    @classmethod
    def of(cls, name: str, method: str, path: str, who: Who, most_bytes: int = 0) -> Route:
        return cls(name, method, re.compile(path), who, most_bytes)


ROUTES: tuple[Route, ...] = (
    Route.of("ca", "GET", CA, "anyone"),
    Route.of("join", "POST", JOIN, "stranger", 4 * 2**10),
    Route.of("hello", "POST", HELLO, "newcomer", 256 * 2**10),
    Route.of("pull", "POST", PULL, "device", 256 * 2**10),
    Route.of("push", "POST", PUSH, "device", LENGTH.size + MAX_HEAD_BYTES + INLINE_BYTES),
    Route.of("leave", "POST", LEAVE, "device", 4 * 2**10),
    Route.of("bundle", "GET", r"/tw/v1/asks/(?P<ask>[A-Za-z0-9._~-]{1,255})/bundle", "device"),
    Route.of("offset", "HEAD", rf"/tw/v1/parts/(?P<run>{RUN})/(?P<sequence>\d{{1,18}})/(?P<index>\d{{1,6}})", "device"),
    Route.of(
        "part", "PUT", rf"/tw/v1/parts/(?P<run>{RUN})/(?P<sequence>\d{{1,18}})/(?P<index>\d{{1,6}})", "device", 2**40
    ),
)


@dataclass(frozen=True)
class Found:
    """A route, what its path names, and what stands behind the question mark."""

    route: Route
    names: dict[str, str]
    query: dict[str, str]


def found(method: str, target: str) -> Found | None:
    """The route of a request target, compared byte for byte: nothing is unquoted or normalised."""
    path, question, query = target.partition("?")
    for route in ROUTES:
        if route.method == method and (match := route.path.fullmatch(path)) is not None:
            if question and route.name != "part":
                return None
            try:
                return Found(route, match.groupdict(), dict(parse_qsl(query, max_num_fields=4)))
            except ValueError:
                return None
    return None


# What the door answers when it does not let a request in. What it means on a device: flower/device/meaning.py.


UPLOAD_OFFSET = b"upload-offset"
MOST_LETTERS = 1000  # of a reason
LATEST = 221_845_392_000.0  # 9000-01-01: what is learned goes on, and a clock shows nothing after the year 9999
LONGEST_S = 3600.0  # a device that was sent away for longer would be lost


class Refusal(Exception):
    """One answer of the door: an HTTP status, a kind that programs read, and a reason that people read.

    `now` is the aggregator's wall clock, `retry_after_s` when to come again (0: not said), `offset` where an upload
    goes on (-1: not said). Statuses, and no others: 401 (signature, clock, replay, hello, unknown), 403 (pending,
    revoked, device, invitation, protocol), 404, 409 (offset, writer, name, process, state-lost, protocol), 412, 413,
    429, 503.
    """

    def __init__(
        self, status: int, kind: str, why: str, *, now: float = 0.0, retry_after_s: float = 0.0, offset: int = -1
    ) -> None:
        super().__init__(why)
        self.status, self.kind, self.why = status, kind, why
        self.now, self.retry_after_s, self.offset = now, retry_after_s, offset
        self.verified = False  # whether a signature was verified for it: it counts against who made the request

    def body(self, now: float) -> bytes:
        """What is sent; a path that nobody knows is answered with nothing."""
        if self.status == 404 and not self.kind:
            return b""
        return json.dumps({"error": self.kind, "why": self.why, "now": now}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = []
        if self.retry_after_s or self.status in (429, 503):
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.offset >= 0:
            found.append((UPLOAD_OFFSET, str(self.offset).encode()))
        return found

    @classmethod
    def read(cls, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Refusal:
        """What the other end said, within what a device can do with it; anything else is kept as its status."""
        given = headers or {}
        numbers = {
            "retry_after_s": min(max(_number(given.get("retry-after", "0"), 0.0), 0.0), LONGEST_S),
            "offset": int(_number(given.get(UPLOAD_OFFSET.decode(), "-1"), -1.0)),
        }
        try:
            said: Any = json.loads(body)
            kind, why = (plain(str(said[name])[:MOST_LETTERS]) for name in ("error", "why"))
            if "try" in said:  # as the page refuses (web/app.py), and no door does
                return cls(status, "page", f'it answers "{kind}"')
            now = min(max(_number(said.get("now", 0.0), 0.0), 0.0), LATEST)
            return cls(status, kind, why, now=now, **numbers)  # type: ignore[arg-type]  # each of its kind
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls(status, "http", f"it answered with status {status}", **numbers)  # type: ignore[arg-type]  # as above


def unknown_path() -> Refusal:
    """Made anew each time: an exception that is raised twice holds on to the frames of both, and to all in them."""
    return Refusal(404, "", "")


def _number(text: Any, otherwise: float) -> float:
    try:
        found = float(text)
    except (ValueError, TypeError, OverflowError):
        return otherwise
    return found if math.isfinite(found) else otherwise
