"""The model that was sent last, read and decoded once for all sessions of a process that are sent it."""

from __future__ import annotations

from pathlib import Path

from thinwire.aggregation.downlink import Shadow
from thinwire.aggregation.model_file import FULL
from thinwire.client.answering.exchange import BUFFERS, take_base
from thinwire.core.types import Ask, Part, Vector


class Bases:
    """Law: `take` does what `take_base` does. It keeps one model, so it is for many sessions and not for a device."""

    def __init__(self) -> None:
        self._sent: tuple[int, str, tuple[Part, ...]] | None = None
        self._params: Vector | None = None
        self._buffers: Vector | None = None

    def take(self, ask: Ask, bundle: Path | None, shadow: Shadow) -> Vector | None:
        sent = ask.base_version, ask.base_digest, ask.parts
        if sent == self._sent and self._params is not None:
            shadow.params, shadow.version = self._params, ask.base_version
            return self._buffers
        buffers = take_base(ask, bundle, shadow)
        if _whole(ask.parts):
            self._sent, self._params, self._buffers = sent, shadow.params, buffers
        return buffers


def _whole(parts: tuple[Part, ...]) -> bool:
    """Whether they are the same model for everybody, whichever he holds."""
    kinds = {part.name.partition("/")[0] for part in parts}
    return FULL in kinds and kinds <= {FULL, BUFFERS}
