"""What is known of each device's link and speed, over all runs: learned from answers, kept in the store."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from thinwire.aggregation.plan_codecs import rungs
from thinwire.compression.catalog import bits
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import DeviceTimes
from thinwire.core.plan_schema import LocalSection
from thinwire.core.types import ReplyHead
from thinwire.store.read_models import MeasureRow

MAX_RTT_S = 600.0  # a device that claims more would lengthen every automatic deadline

LINK = ("down", "up", "rtt")  # of the device, whatever it works on
Key = tuple[str, str, str]  # device, kind, work


def work_of(plan: RunPlan, layout: Layout) -> str:
    """What speed is a matter of: the model and the batch."""
    return f"{layout.digest[:16]}/{plan.local.batch * plan.local.accumulate}"


def epochs_of(plan: RunPlan) -> float:
    """Passes over its own data that a device makes a round; 0 where the plan counts steps."""
    return 0.0 if plan.local.steps is not None else plan.local.epochs or 1.0


@dataclass(frozen=True)
class Errand:
    """What an ask takes: bytes both ways, steps (or `epochs` of the device's own data), and whether it measures."""

    down_bytes: int
    up_bytes: int
    steps: int = 0
    epochs: float = 0.0
    evaluates: bool = False


@dataclass(frozen=True)
class DeviceKnown:
    """One device at one kind of work. Of what was never seen there is None."""

    down: Line | None = None
    up: Line | None = None
    rtt: Spread | None = None
    step: Spread | None = None  # seconds a local step
    epoch_steps: Spread | None = None  # steps in one pass over its data
    evaluate: Spread | None = None
    encode: Spread | None = None

    def steps(self, errand: Errand) -> float | None:
        """Local steps that an errand comes to; None while it is not known how many an epoch has."""
        if errand.steps:
            return errand.steps
        return None if self.epoch_steps is None else errand.epochs * self.epoch_steps.p50

    def travels_s(self, errand: Errand) -> float | None:
        """Usual seconds of both ways together; None while one of them was never seen."""
        if self.up is None or (errand.down_bytes and self.down is None):
            return None
        down_s = self.down.seconds(errand.down_bytes).p50 if self.down and errand.down_bytes else 0.0
        return down_s + self.up.seconds(errand.up_bytes).p50

    def seconds(self, errand: Errand) -> Spread | None:
        """From being handed an ask to having its answer; None while a part of it was never seen."""
        steps = self.steps(errand)
        if steps is None or self.step is None or self.up is None or (errand.down_bytes and self.down is None):
            return None
        total = self.step.times(steps) + self.up.seconds(errand.up_bytes) + (self.encode or NOTHING)
        if self.down is not None and errand.down_bytes:
            total += self.down.seconds(errand.down_bytes)
        return total + self.evaluate if errand.evaluates and self.evaluate else total


class Known:
    """The last KEPT samples of each kind. Law: what is read back from the rows decides as what wrote them."""

    def __init__(self, rows: Iterable[MeasureRow] = ()) -> None:
        self._samples: dict[Key, deque[Sample]] = {
            (row.device, row.kind, row.work): deque(((n, s) for n, s in row.samples), KEPT) for row in rows
        }
        self._news: set[Key] = set()
        self._found: dict[str, dict[str, DeviceKnown]] = {}  # device -> work -> what all that comes to, until news come

    def learn(self, device: str, work: str, found: Mapping[str, Sample]) -> None:
        """Take in what an answer showed."""
        self._found.pop(device, None)
        for kind, sample in found.items():
            key = device, kind, "" if kind in LINK else work
            self._samples.setdefault(key, deque(maxlen=KEPT)).append(sample)
            self._news.add(key)

    def greeted(self, device: str, rtt_s: float) -> None:
        """Take in the round trip that a hello told of; it is told again and again."""
        if 0 < rtt_s <= MAX_RTT_S and (1.0, rtt_s) not in self._of(device, "rtt"):
            self.learn(device, "", {"rtt": (1.0, rtt_s)})

    def device(self, name: str, work: str) -> DeviceKnown:
        found = self._found.setdefault(name, {})
        if work not in found:
            found[work] = self._fitted(name, work)
        return found[work]

    def _fitted(self, name: str, work: str) -> DeviceKnown:
        rtt = spread(s for _, s in self._of(name, "rtt"))
        rtt_s = rtt.p50 if rtt else 0.0
        each = {kind: self._each(name, kind, work) for kind in ("step", "pass", "evaluate", "encode")}
        return DeviceKnown(
            line(self._of(name, "down"), rtt_s), line(self._of(name, "up"), rtt_s), rtt,
            each["step"], each["pass"], each["evaluate"], each["encode"],
        )  # fmt: skip

    @property
    def devices(self) -> list[str]:
        return sorted({device for device, _, _ in self._samples})

    def best(self, name: str, work: str, errand: Errand) -> DeviceTimes | None:
        """The least that an errand could have taken this device; None while a part of it was never seen."""
        device = self.device(name, work)
        steps, each = device.steps(errand), [s / n for n, s in self._of(name, "step", work) if n]
        if device.up is None or (errand.down_bytes and device.down is None) or steps is None or not each:
            return None
        down_s = device.down.least_s(errand.down_bytes) if device.down and errand.down_bytes else 0.0
        return DeviceTimes(down_s, steps * min(each), device.up.least_s(errand.up_bytes))

    def news(self, at: float) -> list[MeasureRow]:
        """The rows that have changed since they were asked for last, with their figures."""
        changed, self._news = sorted(self._news), set()
        return [self._row(key, at) for key in changed]

    def _of(self, device: str, kind: str, work: str = "") -> list[Sample]:
        return list(self._samples.get((device, kind, work), ()))

    def _each(self, device: str, kind: str, work: str) -> Spread | None:
        return spread(seconds / count for count, seconds in self._of(device, kind, work) if count)

    def _row(self, key: Key, at: float) -> MeasureRow:
        device, kind, work = key
        known = self.device(device, work)
        figures: Mapping[str, Spread | None] = {
            "down": known.down.bits_s if known.down else None, "up": known.up.bits_s if known.up else None,
            "rtt": known.rtt, "step": known.step, "pass": known.epoch_steps, "evaluate": known.evaluate,
            "encode": known.encode,
        }  # fmt: skip
        figure = figures[kind]
        samples = [[float(n), float(s)] for n, s in self._samples[key]]
        p50, p90 = (figure.p50, figure.p90) if figure else (None, None)
        return MeasureRow(device, kind, work, samples, p50, p90, at)


# How long a device takes: estimates with their uncertainty, from durations that were seen. No I/O.
#
# A transfer of n bytes takes `start_s + n * byte_s`. The slope is the median over pairs of transfers (Theil 1950, Sen
# 1968), which nearly a third of them may spoil; pairs of about one size say nothing of it. What the line leaves over
# is kept as ratios, seen over fitted, so that predictions at the sizes that are usual are right whatever the line is.


KEPT = 16  # of the last ones: one outlier among them is passed over, two are believed
UNLIKE = 2.0  # how many times larger a transfer must be than another, for the two to tell a start from a rate
START_SHARE = 0.5  # of the quickest transfer: the most that a round trip explains while all have one size
THIN_BYTES_S = 125_000.0  # 1 Mb/s, the thinnest links that we measure: as thin is one that nothing is known of
START_S = 1.0  # the most that a start is taken to be where a thin link would have carried as much in less
LEAST_BYTE_S = 1e-15  # 8 Pb/s: a claim below it is no rate, and its inverse no number

Sample = tuple[float, float]  # (how much, seconds): bytes, steps, or 1


@dataclass(frozen=True)
class Spread:
    """Seconds: half of all are at most `p50`, nine of ten at most `p90`."""

    p50: float
    p90: float

    def __add__(self, other: Spread) -> Spread:
        """One after the other, if one being slow says nothing about the other: what is over p50 adds as squares."""
        middle = self.p50 + other.p50
        return Spread(middle, middle + math.hypot(self.p90 - self.p50, other.p90 - other.p50))

    def times(self, factor: float) -> Spread:
        return Spread(self.p50 * factor, self.p90 * factor)


NOTHING = Spread(0.0, 0.0)


def spread(values: Iterable[float]) -> Spread | None:
    """Median and p90 of what was seen; None where nothing was.

    p90 is the nearest rank, but from 3 values on never the largest: one outlier decides nothing. It lies at least
    p50 / 2n over p50: one value alone says as little of the next as the first round trip of TCP (RFC 6298, 2.2).

    >>> spread([2.0]), spread([2.0, 4.0, 6.0, 90.0])
    (Spread(p50=2.0, p90=3.0), Spread(p50=5.0, p90=6.0))
    """
    ordered = sorted(values)
    if not ordered:
        return None
    count = len(ordered)
    rank = math.ceil(0.9 * count)
    middle = statistics.median(ordered)
    seen = ordered[(min(rank, count - 1) if count >= 3 else rank) - 1]
    return Spread(middle, max(seen, middle * (1 + 0.5 / count)))


@dataclass(frozen=True)
class Line:
    """The time of a transfer by its size. `ratio`: what was seen over what the line says; `best`: the least of it."""

    start_s: float
    byte_s: float
    ratio: Spread
    best: float

    def seconds(self, size: float) -> Spread:
        return self.ratio.times(self.start_s + self.byte_s * size)

    def least_s(self, size: float) -> float:
        """The quickest that it could have been, by the best transfer that was seen."""
        return self.best * (self.start_s + self.byte_s * size)

    @property
    def bits_s(self) -> Spread | None:
        """Bandwidth: half the transfers had at least p50, nine of ten at least p90; None: too fast to be seen."""
        usual, slow = self.byte_s * self.ratio.p50, self.byte_s * self.ratio.p90
        if min(usual, slow) < LEAST_BYTE_S:
            return None
        return Spread(8 / usual, 8 / slow)


def line(transfers: Sequence[Sample], rtt_s: float = 0.0) -> Line | None:
    """Fit (bytes, seconds); None where there are none.

    Transfers of one size cannot tell the start from the rate: then the start is a known round trip, but at most half
    of the quickest. So little was sent says little of bandwidth, and it is rather taken to be lower than it is, but
    not as low as if a small answer's own overhead were its bytes: what 1 Mb/s would have carried in less time spent
    the rest of it, up to a second, on starting.

    >>> line([(1e3, 0.11), (1e6, 1.1), (1e3, 0.09), (2e6, 2.1)]).bits_s.p50  # doctest: +ELLIPSIS
    8...
    >>> round(line([(400, 0.1)]).seconds(40_000).p50, 2)
    0.42
    """
    sized = [(size, seconds) for size, seconds in transfers if size > 0]
    if not sized:
        return None
    start, rate = _fit(sized, rtt_s)
    fitted = [(seconds, start + rate * size) for size, seconds in sized]
    ratios = [seconds / expected for seconds, expected in fitted if expected > 0] or [1.0]
    return Line(start, rate, spread(ratios) or Spread(1.0, 1.0), min(ratios))


def _fit(sized: Sequence[Sample], rtt_s: float) -> tuple[float, float]:
    ordered = sorted(sized)
    unlike = ordered[-1][0] >= UNLIKE * ordered[0][0]
    pairs = [(a, b) for a, b in combinations(ordered, 2) if b[0] >= UNLIKE * a[0]] if unlike else []
    if pairs:
        rate = max(0.0, statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs))
        start = statistics.median(seconds - rate * size for size, seconds in sized)
        if start >= 0:
            return start, rate
        return 0.0, statistics.median(seconds / size for size, seconds in sized)
    quickest = min(seconds for _, seconds in sized)
    left_s = min(seconds - size / THIN_BYTES_S for size, seconds in sized)  # of what a thin link would have taken
    start = max(min(rtt_s, START_SHARE * quickest), min(START_S, left_s))
    return start, statistics.median((seconds - start) / size for size, seconds in sized)


# What one answer says of its device: durations, each of one clock.


SLACK_S, SLACK = 1e-3, 1e-3  # by how much two stopwatches may differ over the same time

Durations = dict[str, Sample]


def at_own_pace(found: Durations, head: ReplyHead, local: LocalSection, asked: tuple[int, int] | None) -> Durations:
    """Of an answer with steps and a batch of its own (`asked`; None: not known any more): what it says of a step of the
    plan's batch, and of a pass over the device's data, which is told by its examples where nothing ended training.
    """
    if asked is None or asked[1] != local.batch:
        found = {kind: sample for kind, sample in found.items() if kind != "step"}
    if found and head.planned in (0, head.steps) and head.examples:
        found["pass"] = (1, math.ceil(head.examples / (local.batch * local.accumulate)))
    return found


def durations(head: ReplyHead, sent_bytes: int, epochs: float) -> Durations:
    """(how much, seconds) by kind: `down`, `up`, `step`, `evaluate`, `encode`; and `pass`, the steps of one epoch.

    The aggregator's stopwatch runs from handing the ask out to having the answer, the device's over its own work; `up`
    is what the first shows beyond the second: the upload, and all latency. So the parts add up to what was waited for.
    A device that claims to have worked for longer than its ask was out is not believed, and nothing is learned from
    an answer that this process did not hand out the ask of.
    """
    transfer, own = head.transfer, head.timings
    if transfer is None or not transfer.pulled_at or not head.parts:
        return {}
    out_s = transfer.arrived_at - transfer.pulled_at
    own_s = own.download_s + own.queue_s + own.evaluate_s + own.train_s + own.encode_s
    if own_s > out_s * (1 + SLACK) + SLACK_S:
        return {}
    found: Durations = {"up": (head.payload_bytes, max(0.0, out_s - own_s)), "encode": (1, own.encode_s)}
    if sent_bytes > 0:
        found["down"] = (sent_bytes, own.download_s)
    if head.steps > 0:
        found["step"] = (head.steps, own.train_s)
        if epochs:
            found["pass"] = (epochs, head.steps)
    if any(name.startswith("eval/") for name in head.metrics):
        found["evaluate"] = (1, own.evaluate_s)
    return found


# What an ask of a run takes its devices: bytes both ways, steps, and the seconds that they are expected to need.


FLOAT_BYTES = 4


def update_bytes(codec: str, layout: Layout, came: Mapping[str, list[int]]) -> int:
    """Of one update in this codec: what is usual among those that came, else as many bits as normal values take.

    `came`: codec -> bytes of updates.
    """
    if seen := came.get(codec):
        return int(statistics.median(seen))
    return int(bits(codec) * layout.size / 8)


def errand(plan: RunPlan, round_number: int, down_bytes: int, up_bytes: int) -> Errand:
    """What a training ask of this round takes a device."""
    evaluates = plan.run.evaluate == "clients" and (round_number - 1) % plan.run.evaluate_every == 0
    steps = plan.local.steps if isinstance(plan.local.steps, int) else 0
    return Errand(down_bytes, up_bytes, steps, epochs_of(plan), evaluates)


def best_times(known: Known, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """The best that each device has been seen to do, of what a round of this plan takes at least; unknown ones not."""
    down = 0 if plan.downlink.compressed else layout.size * FLOAT_BYTES
    taken = errand(plan, 0, down, min(update_bytes(codec, layout, {}) for codec in rungs(plan.uplink)))
    found = {device: known.best(device, work_of(plan, layout), taken) for device in known.devices}
    return {device: times for device, times in found.items() if times is not None}
