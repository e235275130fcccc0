"""What is known of each device's link and speed, over all runs: learned from answers, kept in the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from thinwire.core.check import DeviceTimes
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.server.links import KEPT, NOTHING, Line, Sample, Spread, line, spread
from thinwire.store.rows import MeasureRow

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
