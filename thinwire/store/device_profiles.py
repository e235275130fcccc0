"""Estimates each device's link and speed from the durations of its replies, over all runs.

`durations` reads samples from a reply, `DeviceProfiles` keeps the last ones of each device (the store saves them), and
`DeviceProfile.seconds` predicts how long an assignment takes. This module does no I/O.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from thinwire.compression.catalog import bits
from thinwire.core.formatting import p90_rank
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import DeviceTimes
from thinwire.core.plan_schema import LocalSection
from thinwire.core.types import ReplyHeader
from thinwire.store.read_models import LINK_KINDS, MeasureRow

MAX_RTT_S = 600.0  # a device that reports more would lengthen every automatic deadline
Key = tuple[str, str, str]  # device, kind, work


def work_key(plan: RunPlan, layout: Layout) -> str:
    """Return the key of the work that a speed belongs to: the model's layout and the examples of a step."""
    return f"{layout.digest[:16]}/{plan.local.batch * plan.local.accumulate}"


def epochs_of(plan: RunPlan) -> float:
    """Return how many passes over its own data a device makes in a round; 0 if the plan counts steps."""
    return 0.0 if plan.local.steps is not None else plan.local.epochs or 1.0


@dataclass(frozen=True)
class Workload:
    """Holds the work of an assignment.

    This is bytes both ways, local steps (or `epochs` of the device's own data), and whether the device evaluates.
    """

    down_bytes: int
    up_bytes: int
    steps: int = 0
    epochs: float = 0.0
    evaluates: bool = False


@dataclass(frozen=True)
class DeviceProfile:
    """Holds the profile of one device for one kind of work; None for each part that was never measured."""

    down: LinkModel | None = None
    up: LinkModel | None = None
    rtt: Quantiles | None = None
    step: Quantiles | None = None  # seconds a local step
    epoch_steps: Quantiles | None = None  # steps in one pass over its data
    evaluate: Quantiles | None = None
    encode: Quantiles | None = None

    def steps(self, workload: Workload) -> float | None:
        """Return the local steps of an assignment; None while the number of steps in an epoch is unknown."""
        if workload.steps:
            return workload.steps
        return None if self.epoch_steps is None else workload.epochs * self.epoch_steps.p50

    def travels_s(self, workload: Workload) -> float | None:
        """Return the usual seconds of download and upload together; None while one of them was never measured."""
        if self.up is None or (workload.down_bytes and self.down is None):
            return None
        down_s = self.down.seconds(workload.down_bytes).p50 if self.down and workload.down_bytes else 0.0
        return down_s + self.up.seconds(workload.up_bytes).p50

    def seconds(self, workload: Workload) -> Quantiles | None:
        """Return the time from the delivery of an assignment to its reply; None while a part of it was never
        measured.
        """
        steps = self.steps(workload)
        if steps is None or self.step is None or self.up is None or (workload.down_bytes and self.down is None):
            return None
        total = self.step.times(steps) + self.up.seconds(workload.up_bytes) + (self.encode or NOTHING)
        if self.down is not None and workload.down_bytes:
            total += self.down.seconds(workload.down_bytes)
        return total + self.evaluate if workload.evaluates and self.evaluate else total


class DeviceProfiles:
    """Holds the last MAX_SAMPLES samples of each kind for each device.

    Invariant: samples that are read back from the store give the same decisions as those that were saved.
    """

    def __init__(self, rows: Iterable[MeasureRow] = ()) -> None:
        self._samples: dict[Key, deque[Sample]] = {
            (row.device, row.kind, row.work): deque(((n, s) for n, s in row.samples), MAX_SAMPLES) for row in rows
        }
        self._changed: set[Key] = set()
        self._found: dict[str, dict[str, DeviceProfile]] = {}  # device -> work -> profile, until it has new samples

    def learn(self, device: str, work: str, found: Mapping[str, Sample]) -> None:
        """Add the samples of one reply; each sample is (amount, seconds)."""
        self._found.pop(device, None)
        for kind, sample in found.items():
            key = device, kind, "" if kind in LINK_KINDS else work
            self._samples.setdefault(key, deque(maxlen=MAX_SAMPLES)).append(sample)
            self._changed.add(key)

    def learn_rtt(self, device: str, rtt_s: float) -> None:
        """Add the round-trip time that a device reports when it connects; repeated reports of it count once."""
        if 0 < rtt_s <= MAX_RTT_S and (1.0, rtt_s) not in self._of(device, "rtt"):
            self.learn(device, "", {"rtt": (1.0, rtt_s)})

    def device(self, name: str, work: str) -> DeviceProfile:
        """Return the profile of a device for a kind of work."""
        found = self._found.setdefault(name, {})
        if work not in found:
            found[work] = self._fitted(name, work)
        return found[work]

    def _fitted(self, name: str, work: str) -> DeviceProfile:
        rtt = spread(s for _, s in self._of(name, "rtt"))
        rtt_s = rtt.p50 if rtt else 0.0
        each = {kind: self._each(name, kind, work) for kind in ("step", "pass", "evaluate", "encode")}
        return DeviceProfile(
            line(self._of(name, "down"), rtt_s), line(self._of(name, "up"), rtt_s), rtt,
            each["step"], each["pass"], each["evaluate"], each["encode"],
        )  # fmt: skip

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices that have samples, sorted."""
        return sorted({device for device, _, _ in self._samples})

    def least_times(self, name: str, work: str, workload: Workload) -> DeviceTimes | None:
        """Return the least time that an assignment could have taken this device; None while a part was never
        measured.
        """
        device = self.device(name, work)
        steps, each = device.steps(workload), [s / n for n, s in self._of(name, "step", work) if n]
        if device.up is None or (workload.down_bytes and device.down is None) or steps is None or not each:
            return None
        down_s = device.down.least_s(workload.down_bytes) if device.down and workload.down_bytes else 0.0
        return DeviceTimes(down_s, steps * min(each), device.up.least_s(workload.up_bytes))

    def changed_rows(self, at: float) -> list[MeasureRow]:
        """Return the rows that have changed since the last call, with their figures at wall time `at`."""
        changed, self._changed = sorted(self._changed), set()
        return [self._row(key, at) for key in changed]

    def _of(self, device: str, kind: str, work: str = "") -> list[Sample]:
        return list(self._samples.get((device, kind, work), ()))

    def _each(self, device: str, kind: str, work: str) -> Quantiles | None:
        return spread(seconds / count for count, seconds in self._of(device, kind, work) if count)

    def _row(self, key: Key, at: float) -> MeasureRow:
        device, kind, work = key
        known = self.device(device, work)
        figures: Mapping[str, Quantiles | None] = {
            "down": known.down.bits_s if known.down else None, "up": known.up.bits_s if known.up else None,
            "rtt": known.rtt, "step": known.step, "pass": known.epoch_steps, "evaluate": known.evaluate,
            "encode": known.encode,
        }  # fmt: skip
        figure = figures[kind]
        samples = [[float(n), float(s)] for n, s in self._samples[key]]
        p50, p90 = (figure.p50, figure.p90) if figure else (None, None)
        return MeasureRow(device, kind, work, samples, p50, p90, at)


MAX_SAMPLES = 16  # last samples of a kind; one outlier among them changes nothing, two count
MIN_SIZE_RATIO = 2.0  # least ratio of two sizes that can separate the start from the rate
START_SHARE = 0.5  # of the fastest transfer: the most that a round trip explains if all have one size
THIN_BYTES_S = 125_000.0  # 1 Mb/s, the slowest link in our benchmarks; an unknown link counts as this slow
START_S = 1.0  # longest start assumed if a link of THIN_BYTES_S would have needed less time
LEAST_BYTE_S = 1e-15  # 8 Pb/s: a smaller value is not plausible, and its inverse is no number

Sample = tuple[float, float]  # (amount, seconds): the amount is bytes, steps, or 1


@dataclass(frozen=True)
class Quantiles:
    """Holds two quantiles: half of all values are at most `p50`, nine of ten at most `p90`. Most values are seconds."""

    p50: float
    p90: float

    def __add__(self, other: Quantiles) -> Quantiles:
        """Return the quantiles of both durations in sequence if they are independent: what exceeds p50 adds up as
        squares.
        """
        middle = self.p50 + other.p50
        return Quantiles(middle, middle + math.hypot(self.p90 - self.p50, other.p90 - other.p50))

    def times(self, factor: float) -> Quantiles:
        """Return both quantiles times `factor`."""
        return Quantiles(self.p50 * factor, self.p90 * factor)


NOTHING = Quantiles(0.0, 0.0)


def spread(values: Iterable[float]) -> Quantiles | None:
    """Return the median and p90 of the values; None if there are none.

    p90 is the nearest rank, but from 3 values on never the largest, so that one outlier decides nothing. It is at least
    p50 / 2n above p50: a single value says as little about the next one as the first round trip of TCP (RFC 6298, 2.2).

    >>> spread([2.0]), spread([2.0, 4.0, 6.0, 90.0])
    (Quantiles(p50=2.0, p90=3.0), Quantiles(p50=5.0, p90=6.0))
    """
    ordered = sorted(values)
    if not ordered:
        return None
    count = len(ordered)
    rank = p90_rank(count)
    middle = statistics.median(ordered)
    seen = ordered[(min(rank, count - 1) if count >= 3 else rank) - 1]
    return Quantiles(middle, max(seen, middle * (1 + 0.5 / count)))


@dataclass(frozen=True)
class LinkModel:
    """Holds the linear model of a link: a transfer of n bytes takes `start_s + n * byte_s`.

    `ratio` holds the quantiles of observed over predicted time, and `best` the least of these ratios. So predictions at
    the usual sizes are right, however well the line fits.
    """

    start_s: float
    byte_s: float
    ratio: Quantiles
    best: float

    def seconds(self, size: float) -> Quantiles:
        """Return the quantiles of the seconds that a transfer of `size` bytes takes."""
        return self.ratio.times(self.start_s + self.byte_s * size)

    def least_s(self, size: float) -> float:
        """Return the least seconds that a transfer could have taken, judged by the best transfer so far."""
        return self.best * (self.start_s + self.byte_s * size)

    @property
    def bits_s(self) -> Quantiles | None:
        """Return the bandwidth in bits per second; None if it is too high to be measured.

        Half of the transfers reached at least p50, nine of ten at least p90.
        """
        usual, slow = self.byte_s * self.ratio.p50, self.byte_s * self.ratio.p90
        if min(usual, slow) < LEAST_BYTE_S:
            return None
        return Quantiles(8 / usual, 8 / slow)


def line(transfers: Sequence[Sample], rtt_s: float = 0.0) -> LinkModel | None:
    """Fit the linear model of a link to transfers (bytes, seconds); return None if there are none.

    The slope is the median over pairs of transfers (Theil 1950, Sen 1968), of which nearly a third may be outliers.
    Pairs of similar size are left out, because they say nothing about the slope.

    Transfers of one size cannot separate the start from the rate. Then the start is the known round-trip time, but at
    most half of the fastest transfer. Such small transfers say little about the bandwidth, so the estimate is rather
    too low than too high. But the overhead of a small reply must not count as time for its bytes. If a link of 1 Mb/s
    would have transferred them in less time, the rest counts as start, up to a second.

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
    return LinkModel(start, rate, spread(ratios) or Quantiles(1.0, 1.0), min(ratios))


def _fit(sized: Sequence[Sample], rtt_s: float) -> tuple[float, float]:
    ordered = sorted(sized)
    unlike = ordered[-1][0] >= MIN_SIZE_RATIO * ordered[0][0]
    pairs = [(a, b) for a, b in combinations(ordered, 2) if b[0] >= MIN_SIZE_RATIO * a[0]] if unlike else []
    if pairs:
        rate = max(0.0, statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs))
        start = statistics.median(seconds - rate * size for size, seconds in sized)
        if start >= 0:
            return start, rate
        return 0.0, statistics.median(seconds / size for size, seconds in sized)
    quickest = min(seconds for _, seconds in sized)
    left_s = min(seconds - size / THIN_BYTES_S for size, seconds in sized)  # more than a slow link would have taken
    start = max(min(rtt_s, START_SHARE * quickest), min(START_S, left_s))
    return start, statistics.median((seconds - start) / size for size, seconds in sized)


SLACK_S, SLACK = 1e-3, 1e-3  # difference allowed between two clocks over the same time, absolute and relative

Durations = dict[str, Sample]


def with_own_work(
    found: Durations, header: ReplyHeader, local: LocalSection, assigned: tuple[int, int] | None
) -> Durations:
    """Return the samples of a reply whose assignment had steps and a batch of its own.

    `assigned` is (steps, batch) of the assignment, None if no longer known. A sample of a step counts only if the step
    was of the plan's batch. The steps of a pass over the device's data follow from the number of examples, unless
    training ended early.
    """
    if assigned is None or assigned[1] != local.batch:
        found = {kind: sample for kind, sample in found.items() if kind != "step"}
    if found and header.planned in (0, header.steps) and header.examples:
        found["pass"] = (1, math.ceil(header.examples / (local.batch * local.accumulate)))
    return found


def max_believed_steps(plan: RunPlan, header: ReplyHeader, assigned: int) -> int:
    """Return the most steps that a reply is believed to have made; 0: any number.

    These are the `assigned` ones, or those of the plan's passes over the examples that the device reports. A task's own
    `train()` counts its steps itself, and a larger count would make the device look faster than it is.
    """
    if not (epochs := epochs_of(plan)):
        return assigned
    return max(1, math.ceil(epochs * math.ceil(header.examples / (plan.local.batch * plan.local.accumulate))))


def durations(header: ReplyHeader, sent_bytes: int, epochs: float, most: int = 0) -> Durations:
    """Return the samples of a reply as {kind: (amount, seconds)}, each measured by one clock.

    The kinds are `down`, `up`, `step`, `evaluate` and `encode`; and `pass`, which holds (epochs, steps) instead.

    `encode` is all work around training: loading the model, encoding, and making the reply durable.

    The aggregator measures from the delivery of the assignment to the arrival of the reply, and the device measures its
    own work. The difference is `up`: the upload, and all latency. So the parts add up to the whole time. If a device
    claims to have worked for longer than its assignment was out, it is not believed, and there are no samples. There
    are none either if another process delivered the assignment. No more than `most` steps are believed (0: any number).
    """
    transfer, own = header.transfer, header.timings
    if transfer is None or not transfer.pulled_at or not header.parts:
        return {}
    out_s = transfer.arrived_at - transfer.pulled_at
    around_s = own.load_s + own.encode_s + own.commit_s
    own_s = own.download_s + own.queue_s + own.evaluate_s + own.train_s + around_s
    if own_s > out_s * (1 + SLACK) + SLACK_S:
        return {}
    found: Durations = {"up": (header.payload_bytes, max(0.0, out_s - own_s)), "encode": (1, around_s)}
    if sent_bytes > 0:
        found["down"] = (sent_bytes, own.download_s)
    if (steps := min(header.steps, most or header.steps)) > 0:
        found["step"] = (steps, own.train_s)
        if epochs:
            found["pass"] = (epochs, steps)
    if any(name.startswith("eval/") for name in header.metrics):
        found["evaluate"] = (1, own.evaluate_s)
    return found


def update_bytes(codec: str, layout: Layout, sizes_seen: Mapping[str, list[int]]) -> int:
    """Return the expected bytes of one update in `codec`.

    This is the median of the sizes received so far, else the codec's estimate for normally distributed values.
    `sizes_seen` maps a codec to the bytes of its updates.
    """
    if seen := sizes_seen.get(codec):
        return int(statistics.median(seen))
    return int(bits(codec) * layout.size / 8)


def workload(plan: RunPlan, round_number: int, down_bytes: int, up_bytes: int) -> Workload:
    """Return the work of a training assignment in this round."""
    evaluates = plan.run.evaluate == "clients" and (round_number - 1) % plan.run.evaluate_every == 0
    steps = plan.local.steps if isinstance(plan.local.steps, int) else 0
    return Workload(down_bytes, up_bytes, steps, epochs_of(plan), evaluates)
