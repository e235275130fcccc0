"""What the door answers when it does not let a request in. What it means on a device: flower/device/meaning.py."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from thinwire.core.texts import plain

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
