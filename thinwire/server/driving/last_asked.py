"""What each device was asked last, to be sent again."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.core.fleet import Envelope


class LastAsked:
    """The last `most` asks of each device: as many as it may hold at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asks: dict[str, dict[str, Envelope]] = {}  # device -> ask_id -> ask

    def remember(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            asks = self._asks.setdefault(envelope.device, {})
            asks[envelope.ask.ask_id] = envelope
            while len(asks) > self._most:
                del asks[next(iter(asks))]

    def forget(self, device: str, ask_id: str) -> None:
        self._asks.get(device, {}).pop(ask_id, None)

    def find(self, device: str, ask_id: str) -> Envelope | None:
        """The ask, if it is one of those that went to this device."""
        return self._asks.get(device, {}).get(ask_id)
