"""An ask that has no answer yet, as it goes to the device that it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.core.fleet import Envelope
from thinwire.core.messages import ask_to_bytes
from thinwire.flower.grid import Message


@dataclass
class Outstanding:
    """An ask without an answer yet, and its Flower message. `process`: of the device, that was there when it was sent.
    `pulled_at` is wall-clock, 0 before the first pull.
    """

    envelope: Envelope
    message: Message
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
