"""Bodies, routes and refusals of the device API, as both ends read and write them.

A body is a sequence of blocks: a 4-byte little-endian length, and that many bytes. The bodies are:

- register and join: [JSON];
- pull: [JSON] up; [control JSON] [assignment, possibly empty] parts.. down;
- push: [header] parts.. up; a message of secure aggregation may be followed by the JSON of a pull: then down as pull.

Parts of more than `INLINE_BYTES` together travel apart, so that a cut transfer can be continued
(`server/assignments.py`, `server/uploads.py`). A block of JSON is deflated (RFC 1951) with a dictionary that both ends
know. A header is then little more than its digests.

`ROUTES` lists the paths: the method, the maximum length of a body, and which parts of the path are names. `ApiError` is
the response to a request that is not served; `device/session.py` gives its meaning on a device.
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
from thinwire.core.serialization import MAX_HEADER_BYTES
from thinwire.core.types import Part

LENGTH = struct.Struct("<I")
INLINE_BYTES = 256 * 2**10  # parts of more bytes travel in requests of their own
STREAM_BYTES = 2**20  # read, hashed and written in one step
LEVEL = 6  # of the deflation

# Text that headers share, the most frequent last: RFC 1951 encodes near text in fewer bits. It belongs to protocol 1.
WORDS = (
    b'{"process":"","wait_s":120.0,"in_flight":["1."]}{"cancelled":[]}{"name":"","process":"","tasks":[{"name":"","ver'
    b'sion":"","source_digest":"","layout_digest":"","codecs":["identity","fp16","int8","topk"],"error":""}],"versions'
    b'":{"thinwire":"0.","python":"3.1","torch":"2.","machine":"x86_64","system":"Linux"},"protocol":1,"oldest":1,"lin'
    b'k":{"rtt_s":0.0,"skew_s":0.0},"holds":[""],"plans":[""],"has":{"cores":4,"memory_bytes":,"free_bytes":,"mains":t'
    b'rue,"metered":false},"open_runs":{"-1":""}}{"name":"","sequences":{"},"poll_s":120.0,"server_time":17,"protocol"'
    b':1,"spread_s":0.0,"cas":[],"runs":{"-1":""}}{"kind":"task-error","text":"","assignment_id":"","device":"","proto'
    b'col":1,"transfer":null,"identity":"","type":"failure"}{"assignment_id":"-1.1.","update_id":"-1//1","base_version'
    b'":1,"examples":1,"steps":1,"a":1.0,"norm":0.0,"metrics":{"eval/loss":[0.0,1.0],"eval/accuracy":[0.0,1.0],"train/'
    b'loss":[0.0,1.0]},"timings":{"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":0.0,"encode_s":0.0,"load_s'
    b'":0.0,"commit_s":0.0},"parts":[{"name":"frame/0","length":1,"sha256":"","offset":0},{"name":"buffers","length":1'
    b',"sha256":""}],"codec":"topk(0.01) > int8 > zstd","counters":{},"residual_norm":0.0,"protocol":1,"transfer":null'
    b',"identity":"","type":"reply"}{"assignment_id":"-1.1.","run":"-1","task":"","kind":"evaluate","kind":"train","pl'
    b'an":"","round":1,"base_version":1,"base_digest":"","layout_digest":"","codec":"topk(0.01) > int8 > zstd","work":'
    b'{"steps":0,"batch":32},"deadline_s":60.0,"parts":[{"name":"full/0","length":1,"sha256":"","offset":0}],"outcomes'
    b'":[{"update_id":"-1//1","outcome":"dropped","version":1},{"update_id":"-1//1","outcome":"aggregated","version":1'
    b'}],"protocol":1,"identity":"'
)


def block(data: bytes) -> bytes:
    """Return the bytes with their length before them."""
    return LENGTH.pack(len(data)) + data


def pack(json: bytes) -> bytes:
    """Return a block of deflated JSON."""
    deflate = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS, zdict=WORDS)
    return block(deflate.compress(json) + deflate.flush())


def inflate(data: bytes, most: int) -> bytes:
    """Return the JSON of a block; raise ValueError if it is damaged or longer than `most` bytes.

    At most `most + 1` bytes are ever inflated.

    >>> inflate(pack(b'{"round":1}')[4:], 100)
    b'{"round":1}'
    """
    decompressor = zlib.decompressobj(wbits=-zlib.MAX_WBITS, zdict=WORDS)
    try:
        found = decompressor.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"a block is not readable: {error}") from error
    if len(found) > most:
        raise ValueError(f"a block of more than {most} bytes")
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("a block is cut short, or more follows in it")
    return found


def unblock(data: bytes) -> tuple[bytes, memoryview]:
    """Return the first block's bytes, and a view of the bytes after it; raise ValueError if it is cut short."""
    if len(data) < LENGTH.size:
        raise ValueError("a body without a block")
    (length,) = LENGTH.unpack_from(data)
    if LENGTH.size + length > len(data):
        raise ValueError("a block is longer than its body")
    return data[LENGTH.size : LENGTH.size + length], memoryview(data)[LENGTH.size + length :]


def etag(parts: Sequence[Part]) -> str:
    """Return the identity of these parts in this order, equal for every assignment that carries them."""
    return '"' + hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest() + '"'


Who = Literal["anyone", "stranger", "newcomer", "device"]
RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
HELLO, PULL, PUSH = "/tw/v1/hello", "/tw/v1/pull", "/tw/v1/push"
CA, JOIN, LEAVE = "/tw/v1/ca", "/tw/v1/join", "/tw/v1/leave"


@dataclass(frozen=True)
class Route:
    """Describes a path of the device API, and who may call it.

    `path` is a regular expression, `most_bytes` bounds the body. `who` is one of:

    - "anyone": no signature is needed;
    - "stranger": any key may sign;
    - "newcomer": a key that may be enrolled now;
    - "device": a key that has a row.
    """

    name: str
    method: str
    path: str
    who: Who
    most_bytes: int = 0


ROUTES: tuple[Route, ...] = (
    Route("ca", "GET", CA, "anyone"),
    Route("join", "POST", JOIN, "stranger", 4 * 2**10),
    Route("hello", "POST", HELLO, "newcomer", 256 * 2**10),
    Route("pull", "POST", PULL, "device", 256 * 2**10),
    Route("push", "POST", PUSH, "device", LENGTH.size + MAX_HEADER_BYTES + INLINE_BYTES),
    Route("leave", "POST", LEAVE, "device", 4 * 2**10),
    Route("bundle", "GET", r"/tw/v1/assignments/(?P<assignment>[A-Za-z0-9._~-]{1,255})/bundle", "device"),
    Route("offset", "HEAD", rf"/tw/v1/parts/(?P<run>{RUN})/(?P<sequence>\d{{1,18}})/(?P<index>\d{{1,6}})", "device"),
    Route(
        "part", "PUT", rf"/tw/v1/parts/(?P<run>{RUN})/(?P<sequence>\d{{1,18}})/(?P<index>\d{{1,6}})", "device", 2**40
    ),
)


@dataclass(frozen=True)
class RouteMatch:
    """The route of a request, with the named parts of its path and its query."""

    route: Route
    names: dict[str, str]
    query: dict[str, str]


def find_route(method: str, target: str) -> RouteMatch | None:
    """Return the route of a request target, or None.

    The path is compared byte for byte: nothing is unquoted or normalised.
    """
    path, question, query = target.partition("?")
    for route in ROUTES:
        if route.method == method and (match := re.fullmatch(route.path, path)) is not None:
            if question and route.name != "part":
                return None
            try:
                return RouteMatch(route, match.groupdict(), dict(parse_qsl(query, max_num_fields=4)))
            except ValueError:
                return None
    return None


UPLOAD_OFFSET = b"upload-offset"
MAX_LETTERS = 1000  # of a refusal's reason
LATEST = 221_845_392_000.0  # 9000-01-01: a learned clock runs on, and no clock shows a year after 9999
LONGEST_S = 3600.0  # a device that had to wait longer would be lost


class ApiError(Exception):
    """The response to a request that is not served: an HTTP status, a kind for programs, and a reason for people.

    `now` is the aggregator's wall clock in seconds. `retry_after_s` is the delay before the next attempt, 0 if not
    given. `offset` is where an upload continues, -1 if not given. `verified` is True if a signature was verified for
    it: such refusals are counted against the peer.

    The statuses, and no others, are:

    - 401: signature, clock, replay, hello, unknown;
    - 403: pending, revoked, device, invitation, protocol, browser;
    - 404;
    - 409: offset, writer, name, process, state-lost, protocol, ledger;
    - 412, 413, 429 and 503.
    """

    def __init__(
        self, status: int, kind: str, why: str, *, now: float = 0.0, retry_after_s: float = 0.0, offset: int = -1
    ) -> None:
        super().__init__(why)
        self.status, self.kind, self.why = status, kind, why
        self.now, self.retry_after_s, self.offset = now, retry_after_s, offset
        self.verified = False

    def body(self, now: float) -> bytes:
        """Return the response's JSON, or b"" for an unknown path."""
        if self.status == 404 and not self.kind:
            return b""
        return json.dumps({"error": self.kind, "why": self.why, "now": now}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response's headers."""
        found = []
        if self.retry_after_s or self.status in (429, 503):
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.offset >= 0:
            found.append((UPLOAD_OFFSET, str(self.offset).encode()))
        return found

    @classmethod
    def read(cls, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> ApiError:
        """Return the refusal in a response, bounded to values that a device can use.

        A response of another kind becomes a refusal with kind "http".
        """
        given = headers or {}
        numbers = {
            "retry_after_s": min(max(_number(given.get("retry-after", "0"), 0.0), 0.0), LONGEST_S),
            "offset": int(_number(given.get(UPLOAD_OFFSET.decode(), "-1"), -1.0)),
        }
        try:
            said: Any = json.loads(body)
            if "try" in said:  # the dashboard responds so (web/problems.py), the device API never does
                return cls(status, "dashboard", f'it answers "{plain(str(said["detail"])[:MAX_LETTERS])}"')
            kind, why = (plain(str(said[name])[:MAX_LETTERS]) for name in ("error", "why"))
            now = min(max(_number(said.get("now", 0.0), 0.0), 0.0), LATEST)
            return cls(status, kind, why, now=now, **numbers)  # type: ignore[arg-type]  # each of its kind
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls(status, "http", f"it answered with status {status}", **numbers)  # type: ignore[arg-type]  # as above


def unknown_path() -> ApiError:
    """Return a new refusal for an unknown path.

    It is new each time, because an exception that is raised twice keeps the frames of both, and everything in them.
    """
    return ApiError(404, "", "")


def _number(text: Any, otherwise: float) -> float:
    try:
        found = float(text)
    except (ValueError, TypeError, OverflowError):
        return otherwise
    return found if math.isfinite(found) else otherwise
