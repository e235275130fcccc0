"""Decides how long a round may take, and gives the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.server.policy.device_profiles import THIN_BYTES_S

FIRST_S = 60.0  # before any measurement: a device may have to import its task and read its data
LEAST_S = 10.0  # a machine may pause, and a disconnection is noticed after 4 s: neither may cost an update
MARGIN = 3.0  # times the p90 of replies: all wanted replies must be in time together, not each alone
OUTLYING = 10.0  # times the faster half: with MARGIN, a device up to thirty times slower is mostly in time
NAMED = 5  # devices named in a sentence
SHARE = 0.9  # of a deadline in seconds from the plan: the rest is a reserve
LONGER_S = 0.5  # by which a less compressed codec may lengthen a round
FACTOR = 3.0  # times the slowest reply in time
ROUNDS = 3  # the last ones, whose replies count


@dataclass(frozen=True)
class Deadline:
    """Holds how many seconds a round may take, and why.

    `usual_s` is the time within which the wanted replies are expected; None if the deadline does not follow from such a
    time.
    """

    seconds: float
    reason: str
    usual_s: float | None = None

    @property
    def fits_s(self) -> float:
        """Return the seconds within which nine of ten replies of a device must arrive, so that its codec delays others
        little.
        """
        if self.usual_s is None:
            return SHARE * self.seconds
        return min(SHARE * self.seconds, self.usual_s + LONGER_S)


def fixed(seconds: float) -> Deadline:
    """Return the deadline that the plan sets."""
    return Deadline(seconds, f"{seconds:g} s: the plan says so")


def auto_deadline(expected: Mapping[str, float | None], wanted: int, floor: int = 1) -> Deadline:
    """Return three times the time within which as many replies are expected as the round wants.

    `expected` maps each selected device to the seconds within which nine of ten of its replies arrive. None means
    unknown, and counts as the p90 of the known times. Devices slower than the wanted ones do not delay the round.

    Invariant: fewer than half of the wanted devices cannot lengthen a round at will, unless the `floor` of replies for
    a step needs them. A device that uses up its time is measured as that slow, and would get three times as much in the
    next round. So a round gets at most OUTLYING times the deadline of the faster devices alone: half of the wanted
    ones, or as many as the floor needs.

    >>> print(auto_deadline({"a": 20.0, "b": 8.0, "c": 300.0}, wanted=2).reason)
    60 s: three times the 20.0 s in which 2 of 3 answers are expected; c (300 s) is slower
    >>> print(auto_deadline({"a": 5.0, "b": 5.0, "c": 300.0}, wanted=3).reason)
    150 s: ten times what 2 of the 3 wanted would be given alone, and no more; c (300 s) is slower
    """
    known = sorted(seconds for seconds in expected.values() if seconds is not None)
    if not known:
        return Deadline(FIRST_S, f"{FIRST_S:g} s: how long these devices take is not known yet")
    unseen = known[math.ceil(0.9 * len(known)) - 1]
    times = sorted((unseen if seconds is None else seconds, device) for device, seconds in expected.items())
    wanted = min(max(wanted, 1), len(times))
    enough_s, quick = times[wanted - 1][0], _quick(known[:wanted], floor / wanted)
    most_s = OUTLYING * _with_margin(quick[-1])
    seconds = min(_with_margin(enough_s), most_s)
    if seconds == most_s:
        said = f"{seconds:g} s: ten times what {len(quick)} of the {wanted} wanted would be given alone, and no more"
    else:
        said = f"{seconds:g} s: " + ("three times the" if seconds > LEAST_S else "the least, with")
        said += f" {_brief(enough_s)} in which {wanted} of {len(times)} answers are expected"
    if slower := [f"{device} ({_brief(time)})" for time, device in times if time > seconds]:
        said += f"; {listed(slower)} {'is' if len(slower) == 1 else 'are'} slower"
    if unknown := sum(seconds is None for seconds in expected.values()):
        said += f"; {unknown} not known yet count as {_brief(unseen)}"
    return Deadline(seconds, said, min(enough_s, most_s / MARGIN))


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are.

    >>> listed("abc"), listed("abcdefg")
    ('a, b, c', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _with_margin(seconds: float) -> float:
    return max(LEAST_S, math.ceil(10 * MARGIN * seconds) / 10)


def _quick(known: Sequence[float], needed: float) -> Sequence[float]:
    """Return the faster half of the known times, or the share that is `needed` if it is larger; of two devices, one is
    enough.
    """
    return known[: min(len(known), math.ceil(max(0.5, needed) * len(known) - 1e-9))]


def first_model_deadline(up_bytes: int, up_s: float | None) -> Deadline:
    """Return the time for a device to make the initial model and upload the whole of it.

    It is the time of a device about which nothing is known, plus three times the upload. `up_s` is the time within
    which nine of ten such uploads end; None if the device's link was never measured.

    >>> first_model_deadline(3_000_000, None).reason
    '132 s: 60 s to make it, and three times the 24.0 s of 3,000,000 bytes at 1 Mb/s, for its link is not known'
    >>> first_model_deadline(3_000_000, 0.5).reason
    '61.5 s: 60 s to make it, and three times the 0.5 s of 3,000,000 bytes on its link'
    """
    sent_s = up_bytes / THIN_BYTES_S if up_s is None else up_s
    seconds = math.ceil(10 * (FIRST_S + MARGIN * sent_s)) / 10
    link = "at 1 Mb/s, for its link is not known" if up_s is None else "on its link"
    said = f"{seconds:g} s: {FIRST_S:g} s to make it, and three times the {_brief(sent_s)} of {up_bytes:,} bytes {link}"
    return Deadline(seconds, said)


def in_groups(one: Deadline, devices: int, most: int) -> Deadline:
    """Return the deadline of a round whose devices work in groups of at most `most`, one group after the other.

    With `most` = 0, all devices work at once.

    >>> in_groups(Deadline(20.0, "20 s: because"), 9, 4).reason
    '60 s: 3 times over, for at most 4 of 9 devices are at work at once; 20 s: because'
    """
    groups = math.ceil(devices / most) if most else 1
    if groups == 1:
        return one
    seconds = groups * one.seconds
    said = f"{seconds:g} s: {groups} times over, for at most {most} of {devices} devices are at work at once"
    return Deadline(seconds, f"{said}; {one.reason}")


def _brief(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s"


def evaluation_deadline(slowest: Sequence[float]) -> float:
    """Return the seconds for an evaluation: 3 times the slowest reply of the last 3 rounds, or 60 before any round has
    one.

    An evaluation is shorter than the rounds that it is judged by, which also train. So three times the slowest reply is
    ample, even if another device was selected. A single round may have had fast devices only, so three rounds count;
    older ones describe a fleet that has changed. Only replies in time count, so the result is at most three times the
    deadline of a round.

    `slowest` holds for each closed round the seconds from its opening to its last reply, oldest first.

    >>> evaluation_deadline([]), evaluation_deadline([40.0, 9.0, 2.0, 3.0]), evaluation_deadline([0.2])
    (60.0, 27.0, 10.0)
    """
    recent = slowest[-ROUNDS:]
    return max(LEAST_S, FACTOR * max(recent)) if recent else FIRST_S
