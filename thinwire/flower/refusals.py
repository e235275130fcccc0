"""What the door answers when it does not let a request in, and what that means on the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from thinwire.core.errors import Refused, ThinwireError, Unreachable


class Refusal(Exception):
    """One answer of the door: an HTTP status, a kind that programs read, and a reason that people read."""

    def __init__(self, status: int, kind: str, why: str) -> None:
        super().__init__(why)
        self.status, self.kind, self.why = status, kind, why

    def body(self) -> bytes:
        return json.dumps({"error": self.kind, "why": self.why}).encode()

    @classmethod
    def read(cls, status: int, body: bytes) -> Refusal:
        """What the other end said; anything that is no such answer is kept as its status."""
        try:
            said: Any = json.loads(body)
            return cls(status, str(said["error"]), str(said["why"]))
        except (ValueError, KeyError, TypeError):
            return cls(status, "http", f"it answered with status {status}")


HINTS = {
    "name": "give this client another name: --name NAME; or remove the other: thinwire devices revoke NAME",
    "process": "stop the other process, or give this client another name: --name NAME",
    "revoked": "ask the aggregator's operator",
    "pending": "ask the aggregator's operator: thinwire devices approve NAME",
    "clock": "set this machine's clock (timedatectl set-ntp true)",
    "state-lost": "this client's state folder is older than what it sent before: give it another --name",
    "too-large": "ask the aggregator's operator",
    "signature": "is the client of the same version as the aggregator?",
    "disk": "look at the aggregator's disk",
}

# The same request may succeed later: the device keeps its answer and tries again.
RETRIED: frozenset[str] = frozenset({"clock", "replay", "busy", "closing", "disk", "damaged", "hello", "internal"})


def as_error(refusal: Refusal, url: str) -> ThinwireError:
    """What a refusal means on the device: try again later, or stop."""
    later = refusal.kind in RETRIED or refusal.status in {502, 503, 504}
    make: Callable[[str, str, str], ThinwireError] = Unreachable if later else Refused
    what = f"the aggregator at {url} cannot answer now" if later else f"the aggregator at {url} refused this client"
    return make(what, refusal.why, HINTS.get(refusal.kind, "look at the aggregator's output"))
