"""Decides the terms of an assignment, each with its reason: the deadline, the codec, and the local work.

Deadline: how long a round may take, from the plan or from the times that its devices usually need.

Codec: the least compressed one of the plan's codec ladder whose update arrives in time. In time means that no other
device waits for it (`Deadline.fits_s`). An automatic deadline is far longer than a round usually takes. Under one, the
limit is little more than the time that the slowest wanted device needs with the most compressed codec. A device moves
to a more compressed codec at once, because a late reply costs a round. It moves back only after a less compressed codec
would have fitted for some rounds: an unstable link would otherwise be late after each good round. A device that was
never too slow needs no such patience. It moves back by one codec a round, because the time of an update that is larger
than any sent before is a guess.

Local work: with `[local] steps = "auto"`, a device's speed decides its local steps and their examples. An update is
divided by the normaliser of its own steps, so that few steps and many can be averaged (FedNova, Wang et al. 2020). So a
small device takes part with few steps, and no other device waits for it.

`CodecHistory` and `DeviceSpeeds` hold what these decisions need to know. They follow from the journal alone, so a
resumed run decides like the run that was killed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.core.events import RoundOpened, UpdateAccepted
from thinwire.core.formatting import Reason, Reasons, p90
from thinwire.core.plan import RunPlan
from thinwire.core.plan_schema import LocalSection
from thinwire.core.types import Work

UNMEASURED_DEADLINE_S = 60.0  # before any measurement: a device may have to import its task and read its data
MIN_DEADLINE_S = 10.0  # a machine may pause, and a disconnection is noticed after 4 s: neither may cost an update
DEADLINE_MARGIN = 3.0  # times the p90 of replies: all wanted replies must be in time together, not each alone
OUTLIER_FACTOR = 10.0  # times the faster half; with DEADLINE_MARGIN, a device thirty times slower is mostly in time
MAX_NAMED_DEVICES = 5  # devices named in a sentence
DEADLINE_SHARE = 0.9  # of a deadline, within which replies are planned; the rest is a reserve
CODEC_TOLERANCE_S = 0.5  # by which the choice of a less compressed codec may lengthen a round
EVALUATION_MARGIN = 3.0  # times the slowest reply in time: the deadline of an evaluation
EVALUATION_ROUNDS = 3  # last rounds whose replies decide the deadline of an evaluation


@dataclass(frozen=True)
class Deadline:
    """Holds how many seconds a round may take, and the reasons.

    `usual_s` is the time within which the wanted replies are expected; None if the deadline does not follow from such a
    time.
    """

    seconds: float
    reasons: Reasons
    usual_s: float | None = None

    @property
    def fits_s(self) -> float:
        """Return the seconds within which nine of ten replies of a device must arrive, so that its codec delays others
        little.
        """
        if self.usual_s is None:
            return DEADLINE_SHARE * self.seconds
        return min(DEADLINE_SHARE * self.seconds, self.usual_s + CODEC_TOLERANCE_S)


def fixed(seconds: float) -> Deadline:
    """Return the deadline that the plan sets."""
    return Deadline(seconds, [Reason("planned", {})])


def auto_deadline(expected: Mapping[str, float | None], wanted: int, min_updates: int = 1) -> Deadline:
    """Return three times the time within which as many replies are expected as the round wants.

    `expected` maps each selected device to the seconds within which nine of ten of its replies arrive. None means
    unknown, and counts as the p90 of the known times. Devices slower than the wanted ones do not delay the round.

    Invariant: fewer than half of the wanted devices cannot lengthen a round at will, unless a step needs their updates
    (`min_updates`). A device that uses up its time is measured as that slow, and would get three times as much in the
    next round. So a round gets at most OUTLIER_FACTOR times the deadline of the faster devices alone. The faster
    devices are half of the wanted ones, or `min_updates` of them if that is more.

    >>> auto_deadline({"a": 20.0, "b": 8.0, "c": 30.0}, wanted=2)  # doctest: +NORMALIZE_WHITESPACE
    Deadline(seconds=60.0, reasons=[Reason(code='expected', numbers={'margin': 3.0, 'expected_s': 20.0, 'wanted': 2,
    'devices': 3})], usual_s=20.0)
    >>> [reason.code for reason in auto_deadline({"a": 5.0, "b": 5.0, "c": 300.0}, wanted=3).reasons]
    ['outlying', 'slower']
    """
    known = sorted(seconds for seconds in expected.values() if seconds is not None)
    if not known:
        return Deadline(UNMEASURED_DEADLINE_S, [Reason("unmeasured", {})])
    unseen = p90(known)
    times = sorted((unseen if seconds is None else seconds, device) for device, seconds in expected.items())
    wanted = min(max(wanted, 1), len(times))
    enough_s, faster = times[wanted - 1][0], _faster_half(known[:wanted], min_updates / wanted)
    most_s = OUTLIER_FACTOR * _with_margin(faster[-1])
    seconds = min(_with_margin(enough_s), most_s)
    if seconds == most_s:
        reasons = [Reason("outlying", {"factor": OUTLIER_FACTOR, "fastest": len(faster), "wanted": wanted})]
    elif seconds > MIN_DEADLINE_S:
        reasons = [
            Reason(
                "expected",
                {"margin": DEADLINE_MARGIN, "expected_s": enough_s, "wanted": wanted, "devices": len(times)},
            )
        ]
    else:
        reasons = [Reason("least", {"expected_s": enough_s, "wanted": wanted, "devices": len(times)})]
    if slower := [device for time, device in times if time > seconds]:
        slowest_s = times[-1][0]
        reasons.append(Reason("slower", {"count": len(slower), "devices": first_names(slower), "slowest_s": slowest_s}))
    if unknown := sum(seconds is None for seconds in expected.values()):
        reasons.append(Reason("unknown", {"count": unknown, "assumed_s": unseen}))
    return Deadline(seconds, reasons, min(enough_s, most_s / DEADLINE_MARGIN))


def first_names(names: Sequence[str]) -> str:
    """Return the first few names.

    >>> first_names("abc"), first_names("abcdefg")
    ('a, b, c', 'a, b, c, d, e, ...')
    """
    return ", ".join([*names[:MAX_NAMED_DEVICES], *(["..."] if names[MAX_NAMED_DEVICES:] else [])])


def _with_margin(seconds: float) -> float:
    return max(MIN_DEADLINE_S, math.ceil(10 * DEADLINE_MARGIN * seconds) / 10)


def _faster_half(known: Sequence[float], needed: float) -> Sequence[float]:
    """Return the faster half of the known times, or the share `needed` of them if that is more; one of two times."""
    return known[: min(len(known), math.ceil(max(0.5, needed) * len(known) - 1e-9))]


def deadline_in_waves(one: Deadline, devices: int, most: int) -> Deadline:
    """Return the deadline of a round whose devices work in waves of at most `most`, one wave after the other.

    With `most` = 0, all devices work at once.

    >>> deadline_in_waves(Deadline(20.0, []), 9, 4).reasons
    [Reason(code='groups', numbers={'groups': 3, 'most': 4, 'devices': 9, 'each_s': 20.0})]
    """
    groups = math.ceil(devices / most) if most else 1
    if groups == 1:
        return one
    groups_of = Reason("groups", {"groups": groups, "most": most, "devices": devices, "each_s": one.seconds})
    return Deadline(groups * one.seconds, [groups_of, *one.reasons])


def evaluation_deadline(slowest: Sequence[float]) -> float:
    """Return the seconds for an evaluation: three times the slowest reply of the last three rounds; 60 before a reply.

    Those rounds also trained, so an evaluation takes less time than they did, even on another device. One round may
    have selected fast devices only, so three rounds count; older rounds may describe another fleet. Only replies in
    time count, so the result is at most three times the deadline of a round.

    `slowest` holds for each closed round the seconds from its opening to its last reply, oldest first.

    >>> evaluation_deadline([]), evaluation_deadline([40.0, 9.0, 2.0, 3.0]), evaluation_deadline([0.2])
    (60.0, 27.0, 10.0)
    """
    recent = slowest[-EVALUATION_ROUNDS:]
    return max(MIN_DEADLINE_S, EVALUATION_MARGIN * max(recent)) if recent else UNMEASURED_DEADLINE_S


FITTING_ROUNDS = 3  # rounds in which a less compressed codec must have fitted before it is used


@dataclass(frozen=True)
class LadderState:
    """Holds a device's position on the codec ladder.

    `rounds` counts how many rounds in a row the less compressed codec would have fitted, since the device last moved to
    a more compressed one. From FITTING_ROUNDS rounds on, as at the start, nothing prevents a move back.
    """

    codec: str
    less_compressed: str = ""  # the less compressed codec that would have fitted
    rounds: int = FITTING_ROUNDS


@dataclass(frozen=True)
class RungChoice:
    """Holds a device's codec for a round, with the reasons."""

    position: LadderState
    reasons: Reasons


def choose_rung(
    ladder: Sequence[str], expected: Sequence[float | None], left_s: float, before: LadderState | None
) -> RungChoice:
    """Choose the first codec of the ladder whose reply is expected within `left_s`, with the patience described above.

    `expected` holds for each codec the seconds within which nine of ten replies of the device arrive, None if unknown.
    With one unknown, the device keeps its position, or begins with the most compressed codec.

    >>> choice = choose_rung(["fp16", "int8", "topk(0.01)"], [50.0, 25.0, 2.0], 27.0, None)
    >>> choice.position.codec, [reason.code for reason in choice.reasons]
    ('int8', ['fits', 'too-slow'])
    """
    known = [seconds for seconds in expected if seconds is not None]
    if len(known) < len(ladder):
        stays = before or LadderState(ladder[-1])
        return RungChoice(stays, [Reason("link-unknown", {})])
    fits = next((i for i, seconds in enumerate(known) if seconds <= left_s), len(ladder) - 1)
    if before is None:
        return RungChoice(LadderState(ladder[fits]), _rung_reasons(ladder, known, fits, left_s))
    now, patient = ladder.index(before.codec), before.rounds >= FITTING_ROUNDS
    if fits >= now:
        rounds = FITTING_ROUNDS if patient and not before.less_compressed and fits == now else 0
        return RungChoice(LadderState(ladder[fits], rounds=rounds), _rung_reasons(ladder, known, fits, left_s))
    # The rung that would have fitted in all these rounds.
    toward = max(fits, ladder.index(before.less_compressed)) if before.less_compressed else fits
    if patient:
        next_ = max(toward, now - 1)
        return RungChoice(LadderState(ladder[next_]), _rung_reasons(ladder, known, next_, left_s))
    waits = Reason(
        "would-fit",
        {
            "codec": ladder[toward], "expected_s": known[toward], "left_s": left_s, "rounds": before.rounds,
            "patience": FITTING_ROUNDS,
        },
    )  # fmt: skip
    return RungChoice(LadderState(before.codec, ladder[toward], before.rounds + 1), [waits])


def _rung_reasons(ladder: Sequence[str], known: Sequence[float], fits: int, left_s: float) -> Reasons:
    if known[fits] > left_s:
        return [Reason("none-fits", {"expected_s": known[fits], "left_s": left_s})]
    fitting = Reason("fits", {"expected_s": known[fits], "left_s": left_s})
    if fits == 0:
        return [fitting]
    if known[fits - 1] <= left_s:
        return [fitting, Reason("next-rung", {"codec": ladder[fits - 1]})]
    return [fitting, Reason("too-slow", {"codec": ladder[fits - 1], "expected_s": known[fits - 1]})]


KEPT_SIZES = 16  # last updates of a codec whose sizes are kept


@dataclass
class CodecHistory:
    """Holds each device's position on the codec ladder, and the sizes of each codec's updates, from the journal."""

    positions: dict[str, LadderState] = field(default_factory=dict)  # device -> position at its last assignment
    update_sizes: dict[str, list[int]] = field(default_factory=dict)  # codec -> bytes of its last updates

    def apply_opening(self, event: RoundOpened) -> None:
        """Record each device's position on the ladder in a round that has opened.

        A device that is selected during the round has less time than the others, so its position does not change.
        """
        for device, codec in event.codecs.items():
            self.positions[device] = LadderState(codec, *event.standings[device])

    def apply_reply(self, event: UpdateAccepted, codec: str) -> None:
        """Record the size of an update in its codec."""
        sizes = self.update_sizes.setdefault(codec, [])
        sizes.append(sum(part["length"] for part in event.header.get("parts", ())))
        del sizes[:-KEPT_SIZES]


KEPT_REPLIES = 16  # last replies of a device
UNMEASURED_STEPS = 8  # while a device's speed is unknown
MAX_HALVINGS = 3  # of the batch, if even the fewest steps would take too long
MIN_BATCH = 2  # a normalization layer needs two examples


@dataclass(frozen=True)
class DeviceSpeed:
    """Holds the speed of one device at this run's work: that of one reply, or the p90 of its last replies."""

    example_s: float  # seconds of a step for each example of its batch
    rest_s: float  # seconds of all else: download, waiting, evaluation, encoding, upload
    examples: int  # training examples, as far as the device has reported them


@dataclass(frozen=True)
class LocalWork:
    """Holds the work of one device, and the reasons for it."""

    steps: int
    batch: int
    reasons: Reasons


def choose_work(local: LocalSection, speed: DeviceSpeed | None, deadline_s: float) -> LocalWork:
    """Return the steps and batch whose p90 fits the deadline: at least `min_steps`, at most one pass over the device's
    data.

    >>> local = LocalSection(lr=1, steps="auto", batch=10)
    >>> work = choose_work(local, DeviceSpeed(example_s=0.1, rest_s=4.0, examples=1000), 60.0)
    >>> work.steps, work.batch, work.reasons
    (50, 10, [Reason(code='part-pass', numbers={'steps': 50, 'pass_steps': 100, 'left_s': 50.0, 'step_s': 1.0})])
    """
    if speed is None:
        steps = max(UNMEASURED_STEPS, local.min_steps)
        return LocalWork(steps, local.batch, [Reason("speed-unknown", {"steps": steps})])
    left_s = DEADLINE_SHARE * deadline_s - speed.rest_s
    for halvings in range(MAX_HALVINGS + 1):
        batch = max(min(MIN_BATCH, local.batch), local.batch >> halvings)
        step_s = speed.example_s * batch
        whole = max(local.min_steps, math.ceil(speed.examples / (batch * local.accumulate)))
        fit = whole if step_s * whole <= left_s else math.floor(max(0.0, left_s) / step_s) if step_s else 0
        if fit >= local.min_steps:
            reason = Reason("part-pass", {"steps": fit, "pass_steps": whole, "left_s": left_s, "step_s": step_s})
            if fit == whole:
                reason = Reason("whole-pass", {"steps": whole, "left_s": left_s})
            smaller = [Reason("small-batch", {"batch": batch})] if batch != local.batch else []
            return LocalWork(fit, batch, [reason, *smaller])
    least = Reason("least-work", {"steps": local.min_steps, "batch": batch, "left_s": max(0.0, left_s)})
    return LocalWork(local.min_steps, batch, [least])


@dataclass
class DeviceSpeeds:
    """Holds the speed of each device in this run, rebuilt from its journal, so that a resumed run knows the same."""

    _last_speeds: dict[str, deque[DeviceSpeed]] = field(default_factory=dict)

    def apply_reply(self, event: UpdateAccepted, assigned: tuple[int, int] | None) -> None:
        """Record the speed that a reply shows; `assigned` are the steps and batch of its assignment.

        A reply whose work or times are unknown changes nothing.
        """
        seen = _durations(event.header)
        if assigned is None or seen is None:
            return
        (most, batch), (steps, train_s, rest_s) = assigned, seen
        known = self._last_speeds.setdefault(event.device, deque(maxlen=KEPT_REPLIES))
        known.append(DeviceSpeed(train_s / (min(steps, most) * batch), rest_s, int(event.header.get("examples", 0))))

    def of(self, device: str) -> DeviceSpeed | None:
        """Return the speed of a device; None before its first reply that shows it."""
        seen = self._last_speeds.get(device)
        return None if not seen else _usual_speed(seen)


def _usual_speed(seen: Iterable[DeviceSpeed]) -> DeviceSpeed:
    all_seen = list(seen)
    # A device whose training was stopped early reports fewer examples than it has.
    examples = max(one.examples for one in all_seen)
    return DeviceSpeed(p90(one.example_s for one in all_seen), p90(one.rest_s for one in all_seen), examples)


def _durations(header: Mapping[str, object]) -> tuple[int, float, float] | None:
    """Return (steps, seconds of training, seconds of all else), each a duration by one clock; None if they were not
    measured.
    """
    timings, transfer, steps = header.get("timings"), header.get("transfer"), header.get("steps")
    if not isinstance(timings, Mapping) or not isinstance(transfer, Mapping) or not isinstance(steps, int) or not steps:
        return None
    if not transfer.get("pulled_at"):
        return None  # another process of the aggregator delivered the assignment
    train_s = float(timings.get("train_s", 0.0))
    out_s = float(transfer["arrived_at"]) - float(transfer["pulled_at"])
    return steps, train_s, max(0.0, out_s - train_s)


def work_of(plan: RunPlan, devices: int, own: tuple[int, int] | None = None) -> Work:
    """Return the work of a device in a round of `devices` clients; `own` are its own steps and batch, if it has any.

    dgc clips where a gradient is accumulated, on each device for itself (Lin et al. 2018, "Deep gradient compression",
    algorithm 1). The paper clips the N-th part of a gradient to N^(-1/2) times the threshold, and sums over the N
    devices. Here a device clips its whole gradient and the aggregator averages, so the threshold is multiplied by
    N^(1/2). The mean of N independent gradients of this norm has the norm of the threshold.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\nclip_grad=2\\nsteps=1\\n[uplink]\\ncodec="dgc(0.1)"')
    >>> work_of(plan, 16)
    Work(steps=1, batch=32, clip=8.0)
    """
    local = plan.local
    clip = local.clip_grad * math.sqrt(devices) if plan.uplink.dgc and local.clip_grad and devices else 0.0
    steps, batch = own or (local.steps if isinstance(local.steps, int) else 0, local.batch)
    return Work(steps, batch, clip)
