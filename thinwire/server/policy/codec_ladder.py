"""Chooses each device's codec from the plan's codec ladder: the least compressed one whose update arrives in time.

In time means that no other device waits for it (`Deadline.fits_s` in server/policy/deadlines.py). An automatic deadline
is far longer than a round usually takes. Under one, the limit is little more than the time that the slowest wanted
device needs with the most compressed codec.

A device moves to a more compressed codec at once, because a late reply costs a round. It moves back only after a less
compressed codec would have fitted for some rounds: an unstable link would otherwise be late after each good round. A
device that was never too slow needs no such patience. It moves back by one codec a round, because the time of an update
that is larger than any sent before is a guess.

`CodecHistory` holds the codecs of assignments, each device's position on the ladder, and the sizes of updates. It
follows from the journal alone, so a resumed run decodes and decides like the run that was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.core.events import ClientAsked, RoundOpened, UpdateAccepted

PATIENCE = 3  # rounds in which a less compressed codec must have fitted before it is used


@dataclass(frozen=True)
class LadderState:
    """Holds a device's position on the codec ladder.

    `rounds` counts how many rounds in a row the less compressed codec would have fitted, since the device last moved to
    a more compressed one. From PATIENCE rounds on, as at the start, nothing prevents a move back.
    """

    codec: str
    milder: str = ""  # the less compressed codec that would have fitted
    rounds: int = PATIENCE


@dataclass(frozen=True)
class RungChoice:
    """Holds a device's codec for a round, with the reason that is shown."""

    standing: LadderState
    reason: str


def choose(
    ladder: Sequence[str], expected: Sequence[float | None], left_s: float, before: LadderState | None
) -> RungChoice:
    """Choose the first codec of the ladder whose reply is expected within `left_s`, with the patience described above.

    `expected` holds for each codec the seconds within which nine of ten replies of the device arrive, None if unknown.
    With one unknown, the device keeps its position, or begins with the most compressed codec.

    >>> choose(["fp16", "int8", "topk(0.01)"], [50.0, 25.0, 2.0], 27.0, None).reason
    'int8: 25.0 s fit into 27.0 s; fp16 would take 50.0 s'
    """
    known = [seconds for seconds in expected if seconds is not None]
    if len(known) < len(ladder):
        stays = before or LadderState(ladder[-1])
        return RungChoice(stays, f"{stays.codec}: its link is not known yet")
    fits = next((i for i, seconds in enumerate(known) if seconds <= left_s), len(ladder) - 1)
    if before is None:
        return RungChoice(LadderState(ladder[fits]), _said(ladder, known, fits, left_s))
    now, patient = ladder.index(before.codec), before.rounds >= PATIENCE
    if fits >= now:
        rounds = PATIENCE if patient and not before.milder and fits == now else 0
        return RungChoice(LadderState(ladder[fits], rounds=rounds), _said(ladder, known, fits, left_s))
    toward = max(fits, ladder.index(before.milder)) if before.milder else fits  # would have fitted in all these rounds
    if patient:
        next_ = max(toward, now - 1)
        return RungChoice(LadderState(ladder[next_]), _said(ladder, known, next_, left_s))
    said = f"{before.codec}: {ladder[toward]} would fit ({known[toward]:.1f} s of {left_s:.1f} s)"
    said += f", and did for {before.rounds} of {PATIENCE} rounds"
    return RungChoice(LadderState(before.codec, ladder[toward], before.rounds + 1), said)


def _said(ladder: Sequence[str], known: Sequence[float], fits: int, left_s: float) -> str:
    if known[fits] > left_s:
        return f"{ladder[fits]}: even that takes {known[fits]:.1f} s, {left_s:.1f} s are left"
    said = f"{ladder[fits]}: {known[fits]:.1f} s fit into {left_s:.1f} s"
    if fits == 0:
        return said
    if known[fits - 1] <= left_s:
        return f"{said}; {ladder[fits - 1]} may be next"
    return f"{said}; {ladder[fits - 1]} would take {known[fits - 1]:.1f} s"


WEIGHED = 16  # last updates of a codec whose sizes are kept


@dataclass
class CodecHistory:
    """Holds the codecs of the last `kept` rounds, rebuilt from the journal."""

    kept: int
    of_most: dict[int, str] = field(default_factory=dict)  # round -> codec of most devices
    own: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> device -> codec of its own
    standings: dict[str, LadderState] = field(default_factory=dict)  # device -> position at its last assignment
    came: dict[str, list[int]] = field(default_factory=dict)  # codec -> bytes of its last updates

    def of(self, asked_round: int, device: str) -> str:
        """Return the codec of a device's assignment in a round; "" if there was no such round, or too long ago to be
        known.
        """
        return self.own.get(asked_round, {}).get(device) or self.of_most.get(asked_round, "")

    def opened(self, event: RoundOpened) -> None:
        """Record the codecs of a round that has opened, and each device's position on the ladder."""
        self.of_most[event.round], self.own[event.round] = event.codec, dict(event.codecs)
        self.of_most.pop(event.round - self.kept, None)
        self.own.pop(event.round - self.kept, None)
        for device, codec in event.codecs.items():
            self.standings[device] = LadderState(codec, *event.standings[device])

    def asked(self, event: ClientAsked) -> None:
        """Record the codec of an assignment that was made during a round.

        The device had less time than the others, so its position on the ladder does not change.
        """
        if event.codec:
            self.own[event.round][event.device] = event.codec

    def answered(self, event: UpdateAccepted) -> None:
        """Record the size of an update in its codec."""
        sizes = self.came.setdefault(self.of(event.asked_round, event.device), [])
        sizes.append(sum(part["length"] for part in event.head.get("parts", ())))
        del sizes[:-WEIGHED]
