"""An ask that has no answer yet, as it goes to the device that it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from thinwire.core.fleet import Envelope
from thinwire.core.messages import ask_to_bytes


class MessageLog(Protocol):
    """Where the engine keeps its messages. It gives a handle for each one, which only it can read."""

    def ask(self, node_id: int, data: bytes, group: str = "") -> Any: ...
    def delivered(self, message: Any) -> None: ...
    def reply(self, ask: Any, data: bytes) -> Any: ...
    def collect(self, replies: Sequence[Any]) -> list[bytes]: ...
    def forget(self, message: Any) -> None: ...


@dataclass
class Outstanding:
    """An ask without an answer yet, and its Flower message. `process`: of the device, that was there when it was sent.
    `pulled_at` is wall-clock, 0 before the first pull.
    """

    envelope: Envelope
    message: Any  # the handle that a `MessageLog` gave for it
    data: bytes
    process: str
    pulled_at: float = 0.0
    taken: bool = False  # whether it was said that the device has it

    @property
    def length(self) -> int:
        """Of its parts, in bytes."""
        return sum(part.length for part in self.envelope.ask.parts)

    def spoken(self, protocol: int, process: str) -> bytes:
        """The ask as it goes to a process that speaks this version with us: one that says a newer one is not taken, and
        a stop is a farewell to one that came after it was sent.
        """
        ask = self.envelope.ask
        farewell = ask.farewell or (ask.kind == "stop" and process != self.process)
        if ask.protocol <= protocol and farewell == ask.farewell:
            return self.data
        return ask_to_bytes(replace(ask, protocol=min(ask.protocol, protocol), farewell=farewell))
