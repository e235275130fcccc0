"""Which codec a device is asked in: the mildest that its link carries in time, as its last rounds have shown it.

In time is what holds nobody up (`fits_s` of server/policy/deadlines.py): under an automatic deadline, which is far
longer than a round usually takes, little longer than the slowest who is wanted needs with the smallest codec.

Harsher at once, for a late answer costs a round; then milder again only when that would have fitted for some rounds,
for links that waver would be late every time that they are good for once. Who was never too slow needs no patience.
Milder by one codec a round: what is expected of an update that is larger than any that was sent is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.core.events import ClientAsked, RoundOpened, UpdateAccepted

PATIENCE = 3  # rounds in which a milder codec would have fitted before it is asked for


@dataclass(frozen=True)
class Standing:
    """Where a device stands on the ladder.

    `rounds`: in so many in a row `milder` would have fitted since the device was asked in a harsher codec than before.
    With PATIENCE of them, as in the beginning, nothing speaks against a milder one.
    """

    codec: str
    milder: str = ""
    rounds: int = PATIENCE


@dataclass(frozen=True)
class Choice:
    """A device's codec for a round, with the reason as it is shown."""

    standing: Standing
    reason: str


def choose(ladder: Sequence[str], expected: Sequence[float | None], left_s: float, before: Standing | None) -> Choice:
    """The first codec whose answer is expected within `left_s`, as patiently as the module says.

    `expected`: for each codec the seconds in which nine of ten of the device's answers would be here, None where they
    are not known: then it is asked in the smallest, or stays where it stood.

    >>> choose(["fp16", "int8", "topk(0.01)"], [50.0, 25.0, 2.0], 27.0, None).reason
    'int8: 25.0 s fit into 27.0 s; fp16 would take 50.0 s'
    """
    known = [seconds for seconds in expected if seconds is not None]
    if len(known) < len(ladder):
        stays = before or Standing(ladder[-1])
        return Choice(stays, f"{stays.codec}: its link is not known yet")
    fits = next((i for i, seconds in enumerate(known) if seconds <= left_s), len(ladder) - 1)
    if before is None:
        return Choice(Standing(ladder[fits]), _said(ladder, known, fits, left_s))
    now, patient = ladder.index(before.codec), before.rounds >= PATIENCE
    if fits >= now:
        rounds = PATIENCE if patient and not before.milder and fits == now else 0
        return Choice(Standing(ladder[fits], rounds=rounds), _said(ladder, known, fits, left_s))
    toward = max(fits, ladder.index(before.milder)) if before.milder else fits  # what would have fitted in all of them
    if patient:
        next_ = max(toward, now - 1)
        return Choice(Standing(ladder[next_]), _said(ladder, known, next_, left_s))
    said = f"{before.codec}: {ladder[toward]} would fit ({known[toward]:.1f} s of {left_s:.1f} s)"
    said += f", and did for {before.rounds} of {PATIENCE} rounds"
    return Choice(Standing(before.codec, ladder[toward], before.rounds + 1), said)


def _said(ladder: Sequence[str], known: Sequence[float], fits: int, left_s: float) -> str:
    if known[fits] > left_s:
        return f"{ladder[fits]}: even that takes {known[fits]:.1f} s, {left_s:.1f} s are left"
    said = f"{ladder[fits]}: {known[fits]:.1f} s fit into {left_s:.1f} s"
    if fits == 0:
        return said
    if known[fits - 1] <= left_s:
        return f"{said}; {ladder[fits - 1]} may be next"
    return f"{said}; {ladder[fits - 1]} would take {known[fits - 1]:.1f} s"


# In which codec each device was asked in each round, where it stood on the ladder, and how large updates were.
#
# Like all of the past it follows from the journal alone: a resumed run decodes and decides as the one that was killed.


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
