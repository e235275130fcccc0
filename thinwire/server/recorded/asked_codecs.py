"""In which codec each device was asked in each round, where it stood on the ladder, and how large updates were.

Like all of the past it follows from the journal alone: a resumed run decodes and decides as the one that was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.events import ClientAsked, RoundOpened, UpdateAccepted
from thinwire.server.choices.ladder import Standing

WEIGHED = 16  # updates of one codec


@dataclass
class AskedCodecs:
    """A fold over the journal, of the last `kept` rounds."""

    kept: int
    of_most: dict[int, str] = field(default_factory=dict)  # round -> codec
    own: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> device -> codec, where it was given one
    standings: dict[str, Standing] = field(default_factory=dict)  # device -> where it stood when it was asked last
    came: dict[str, list[int]] = field(default_factory=dict)  # codec -> bytes of the last updates in it

    def of(self, asked_round: int, device: str) -> str:
        """The codec that a device was asked in; "" in a round that never was, or too long ago to be known."""
        return self.own.get(asked_round, {}).get(device) or self.of_most.get(asked_round, "")

    def opened(self, event: RoundOpened) -> None:
        self.of_most[event.round], self.own[event.round] = event.codec, dict(event.codecs)
        self.of_most.pop(event.round - self.kept, None)
        self.own.pop(event.round - self.kept, None)
        for device, codec in event.codecs.items():
            self.standings[device] = Standing(codec, *event.standings[device])

    def asked(self, event: ClientAsked) -> None:
        """A device that was asked in the middle of a round, with less time than the others: its standing stays."""
        if event.codec:
            self.own[event.round][event.device] = event.codec

    def answered(self, event: UpdateAccepted) -> None:
        sizes = self.came.setdefault(self.of(event.asked_round, event.device), [])
        sizes.append(sum(part["length"] for part in event.head.get("parts", ())))
        del sizes[:-WEIGHED]
