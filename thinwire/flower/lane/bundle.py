"""The route on which a large ask's parts are fetched, from wherever the last attempt ended."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

from thinwire.flower.door.requests import Gone, Request
from thinwire.flower.lane.exchange import Exchange
from thinwire.flower.lane.sessions import Sessions
from thinwire.flower.wire.framing import STREAM_BYTES, etag
from thinwire.flower.wire.refusals import Refusal

_FROM = re.compile(rb"bytes=(\d{1,18})-")


class BundleRoute:
    """Range and If-Range of RFC 9110, section 14, for one range that reaches to the end."""

    def __init__(self, exchange: Exchange, sessions: Sessions) -> None:
        self._exchange, self._sessions = exchange, sessions

    async def __call__(self, request: Request) -> None:
        outstanding = self._exchange.outstanding(request.row.name, request.names["ask"])
        bundle = outstanding.envelope.bundle if outstanding else None
        if outstanding is None or bundle is None or not outstanding.length:
            raise Refusal(404, "ask", "this ask is answered, withdrawn, or nobody's")
        tag, length = etag(outstanding.envelope.ask.parts), outstanding.length
        start = _start(request.headers, tag)
        if start > length:
            raise Refusal(409, "offset", f"there are {length} bytes", offset=length)
        headers = [(b"content-length", str(length - start).encode()), (b"etag", tag.encode())]
        if start:
            headers.append((b"content-range", f"bytes {start}-{length - 1}/{length}".encode()))
        with self._sessions.call(request.row.name):
            await request.begin(206 if start else 200, headers)
            if start == length:
                await request.write(b"", more=False)
            async for data, more in read(bundle, start, length):
                if self._exchange.outstanding(request.row.name, request.names["ask"]) is None:
                    request.wire.abort()  # withdrawn meanwhile: the device need not have what is buffered either
                    raise Gone
                await request.write(data, more)


def _start(headers: dict[bytes, bytes], tag: str) -> int:
    """Where to begin: what is asked for, when it is of this very bundle."""
    asked = _FROM.fullmatch(headers.get(b"range", b""))
    condition = headers.get(b"if-range", tag.encode())
    return int(asked[1]) if asked and condition == tag.encode() else 0


async def read(path: Path, start: int, length: int) -> AsyncIterator[tuple[bytes, bool]]:
    """A file from `start` in pieces, the next one read while this one is sent, and whether more follow."""
    left = length - start
    with await asyncio.to_thread(open, path, "rb", 0) as file:
        file.seek(start)
        ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(STREAM_BYTES, left)))
        try:
            while left:
                data = await ahead
                if not data:
                    raise OSError(f"{path} is shorter than its ask says")
                left -= len(data)
                ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(STREAM_BYTES, left)))
                yield data, left > 0
        finally:
            await asyncio.wait([ahead])
