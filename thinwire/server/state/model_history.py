"""Holds the model versions of a run, rebuilt from the journal: from the requests for the first to the evaluations.

`InitialModelRequests` knows which devices got a request for the first model, and with which outcome. `ModelHistory`
knows which versions there are, and from which one each device trained. `EvaluationLog` knows how good each version is:
the measurements in the replies, and the evaluation that follows from them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.events import NO_STEP, Evaluated, Event, ModelStored, ReplicaStored, RoundClosed, UpdateAccepted
from thinwire.core.formatting import Reason
from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed, RunExtended
from thinwire.core.score_histogram import MAX_METRIC_LETTERS, MEASURED, TRAINED, Histograms
from thinwire.core.serialization import MAX_METRICS
from thinwire.core.types import Metrics
from thinwire.server.policy.assignment_terms import FIRST_S, Deadline
from thinwire.server.policy.cohort import in_random_order
from thinwire.server.policy.eligibility import barred_s

TRIED = ("offline", "stale")  # may succeed another time: the device was offline, slow or busy
OWN = ("declined", "refused")  # the device's own decision, which says nothing about the task
ENOUGH = 10  # failed devices: then the task is at fault, and trying thousands in turn would take days
MAX_TIMES = 8  # times the first deadline, as the last attempt has by default: all other devices wait meanwhile
AWAY_S = MAX_TIMES * FIRST_S  # an offline device is waited for as long as a silent one
Said = Callable[[str], str]  # device -> digest of its present report; "" before its first one


@dataclass
class InitialModelRequests:
    """Holds the requests for the initial model and their outcomes, rebuilt from the journal.

    `open` is the request whose reply is awaited; no other reply is accepted. `times` counts the requests to each
    device. A device that disconnected or timed out may get another request until `most` of its requests have failed so.
    A device that declined for now may get one after its back-off. Any other failed device may get one once it reports
    something else about itself. A restart resets none of this.
    """

    open: FirstModelAssigned | None = None
    failed: FirstModelFailed | None = None  # the last failure
    times: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)  # device -> requests that failed for one of TRIED
    late: Counter[str] = field(default_factory=Counter)  # device -> those of them that timed out
    _failed: dict[str, FirstModelFailed] = field(default_factory=dict)  # device -> its last failure, oldest first

    def apply(self, event: Event) -> None:
        """Record an event if it concerns the initial model."""
        match event:
            case FirstModelAssigned():
                self.open, self.times[event.device] = event, self.times[event.device] + 1
            case FirstModelFailed(device=device):
                self.open, self.failed = None, event
                self._failed.pop(device, None)
                self._failed[device] = event
                if event.kind in TRIED:
                    self.tried[device] += 1
                if event.kind == "stale":
                    self.late[device] += 1
            case ModelStored():
                self.open = None

    def bars(self, elapsed_s: float, most: int, said: Said) -> dict[str, str]:
        """Return {device: reason} of the devices that get no request at `elapsed_s`.

        Failed attempts count whatever the device has reported since. A device that crashes over the task would
        otherwise connect as a new one each time.
        """
        now = {device: _text(event) for device, event in self._unchanged(said).items() if elapsed_s < _until_s(event)}
        return now | self._given_up(most)

    def reasons(self, said: Said) -> dict[str, str]:
        """Return {device: reason} of the failed devices that have reported nothing else about themselves since."""
        return {device: _text(event) for device, event in self._unchanged(said).items()}

    def may_pass(self, elapsed_s: float, most: int, said: Said) -> set[str]:
        """Return the devices whose reason passes with time, or passed at most `AWAY_S` seconds ago.

        A device that can get a request by then gets one. The others may have left for good.
        """
        untils = {device: _until_s(event) for device, event in self._unchanged(said).items()}
        passing = {d for d, until in untils.items() if math.isfinite(until) and elapsed_s < until + AWAY_S}
        return passing - self._given_up(most).keys()

    def for_good(self, most: int) -> dict[str, str]:
        """Return {device: reason} of the devices that failed permanently, the latest first.

        A device that has used up its `most` attempts is among them. A failure that is the device's own decision (`OWN`)
        is not.
        """
        given_up = self._given_up(most)
        return {
            device: given_up.get(device, _text(event))
            for device, event in reversed(self._failed.items())
            if device in given_up or (event.kind not in OWN and math.isinf(_again_s(event)))
        }

    def next_of(self, able: Sequence[str], seed: int) -> str:
        """Return the able device that got the fewest requests; the seed decides between equals.

        Once `ENOUGH` devices have been tried, an able one among them comes before all others.
        """
        tried = [device for device in able if self.tried[device]] if len(self.tried) >= ENOUGH else []
        return min(in_random_order(tried or able, seed, 0), key=lambda device: self.times[device])

    def _unchanged(self, said: Said) -> dict[str, FirstModelFailed]:
        """Return the last failure of each device that has reported nothing else about itself since."""
        return {device: event for device, event in self._failed.items() if said(device) in ("", event.said)}

    def _given_up(self, most: int) -> dict[str, str]:
        given_up = [device for device, tried in self.tried.items() if tried >= most]
        return {device: f"{_text(self._failed[device])} (assignments: {self.times[device]})" for device in given_up}


def patient(one: Deadline, late: int) -> Deadline:
    """Return the deadline of a device that was `late` so often: doubled each time, up to `MAX_TIMES` its length.

    >>> patient(Deadline(60.0, []), 2)
    Deadline(seconds=240.0, reasons=[Reason(code='late-before', numbers={'times': 4, 'each_s': 60.0})], usual_s=None)
    """
    if not late:
        return one
    times = min(2**late, MAX_TIMES)
    longer = Reason("late-before", {"times": times, "each_s": one.seconds})
    return Deadline(times * one.seconds, [longer, *one.reasons])


def _text(event: FirstModelFailed) -> str:
    return f"{event.kind}: {event.reason}"


def _until_s(event: FirstModelFailed) -> float:
    return event.elapsed_s + _again_s(event)


def _again_s(event: FirstModelFailed) -> float:
    return 0.0 if event.kind in TRIED else barred_s(event.kind, event.reason)


@dataclass
class ModelHistory:
    """Holds the last `kept` model versions as devices hold them, and which version each device trained from.

    If the downlink is compressed, devices hold a replica of the model instead of the model itself.
    """

    kept: int
    model: ModelStored | None = None  # the latest
    models: dict[int, ModelStored] = field(default_factory=dict)  # version -> its model
    replica: ReplicaStored | None = None  # replica of the latest version; None: devices hold the model itself
    changes: dict[int, ReplicaStored] = field(default_factory=dict)  # version -> its replica and downlink update
    made_by: dict[int, int] = field(default_factory=dict)  # version -> the round that made it
    held: dict[str, int] = field(default_factory=dict)  # device -> the version that its last reply trained from

    @property
    def version(self) -> int:
        """Return the number of the latest model version; 0 before there is a model."""
        return self.model.version if self.model else 0

    @property
    def newest(self) -> ModelStored | ReplicaStored:
        """Return the latest version as devices hold it: its replica if there is one, else the model itself."""
        assert self.model is not None, "a run that is driven has a model"
        return self.replica or self.model

    def of(self, version: int) -> ModelStored | ReplicaStored:
        """Return a version as devices hold it."""
        return self.changes.get(version) or self.models[version]

    def apply(self, event: Event) -> None:
        """Record an event that stores or makes a model version, brings a reply, or extends the run."""
        match event:
            case ModelStored():
                self.model, self.replica = event, None
                self.models[event.version] = event
                self.models.pop(event.version - self.kept, None)
            case ReplicaStored():
                self.replica = self.changes[event.version] = event
                self.changes.pop(event.version - self.kept, None)
            case UpdateAccepted():
                self.held[event.device] = int(event.header.get("base_version", 0))
            case RoundClosed() if made_step(event):
                self.made_by[event.version] = event.round
                self.made_by.pop(event.version - self.kept, None)
            case RunExtended():
                self.held = {}  # the devices dropped it when the run ended


def made_step(closed: RoundClosed) -> bool:
    """Return True if the round changed the model."""
    return closed.reason not in NO_STEP


FEWEST = 3  # devices: if two differ, nothing says which one is right


def may_be_recorded(name: str, kind: str) -> bool:
    """Return True if a metric's name begins with this prefix and has an allowed length.

    A simulation parses no messages, so the parser's check of the length is repeated here.
    """
    return name.startswith(kind) and 0 < len(name) - len(kind) <= MAX_METRIC_LETTERS


class Measured(NamedTuple):
    """Holds the metrics of one reply. `examples` is the number of training examples; 0 if the device only evaluated."""

    update_id: str
    device: str
    examples: int
    metrics: Metrics
    histograms: Histograms = {}  # of scores  # noqa: RUF012  # a tuple's field, never changed


@dataclass
class EvaluationLog:
    """Holds the evaluations of model versions, and the measurements of at most `kept` versions that are not evaluated
    yet.
    """

    kept: int
    measured: dict[int, list[Measured]] = field(default_factory=dict)  # version -> until it is evaluated
    evaluated: set[int] = field(default_factory=set)  # of the last `kept` versions
    best: Evaluated | None = None
    reached: int | None = None  # the first version that met the target; a worse evaluation of a later one is no matter
    by_enough: int = 0  # evaluated versions that may be best and meet a target
    since_best: int = 0  # those of them that were evaluated after the best one
    most: int = 0  # the largest number of clients that measured one version
    measurers: set[str] = field(default_factory=set)  # devices whose measurements of some version were evaluated
    names: set[str] = field(default_factory=set)  # all recorded metrics, with their prefix
    units: dict[str, float] = field(default_factory=dict)  # metric -> how much one training example counts in it
    widths: dict[str, float] = field(default_factory=dict)  # metric -> the largest w of server/evaluation.py so far
    examples: dict[str, int] = field(default_factory=dict)  # device -> most training examples reported

    def measure(self, event: UpdateAccepted, newest: int) -> None:
        """Record the metrics of a reply about a version that is not evaluated yet.

        `newest` is the latest model version when the reply arrives.
        """
        version, metrics = int(event.header.get("base_version", 0)), event.header.get("metrics", {})
        examples = int(event.header.get("examples", 0))
        self.examples[event.device] = max(examples, self.examples.get(event.device, 0))
        if version not in self.evaluated and any(name.startswith(MEASURED) for name in metrics):
            found = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
            reply = Measured(event.update_id, event.device, examples, found, event.header.get("histograms", {}))
            self.measured.setdefault(version, []).append(reply)
            self.measured = {known: some for known, some in self.measured.items() if known > newest - self.kept}

    def apply(self, event: Event) -> None:
        """Record an evaluation, or that the run goes on after it ended: then no version has met its target, and its
        patience begins again.
        """
        match event:
            case Evaluated():
                self.evaluate(event)
            case RunExtended():
                self.reached, self.since_best = None, 0

    def evaluate(self, event: Evaluated) -> None:
        """Record the evaluation of a version, and forget the measurements that it is made from."""
        self.evaluated = {known for known in self.evaluated if known > event.version - self.kept} | {event.version}
        self.measurers |= {reply.device for reply in self.measured.pop(event.version, ())}
        self.most = max(self.most, event.clients)
        self.names |= {MEASURED + name for name in event.metrics}
        self.units |= event.units
        self.widths |= event.widths
        self.by_enough += not event.few
        self.since_best = 0 if event.best else self.since_best + (not event.few)
        if event.reached:
            self.reached = min(event.version, event.version if self.reached is None else self.reached)
        if event.best:
            self.best = event

    def lost_patience(self, patience: int | None) -> bool:
        """Return True if as many models as `[run] patience` says were evaluated after the best one."""
        return patience is not None and self.since_best >= patience

    def close(self, event: RoundClosed) -> None:
        """Record the names of the training metrics of a closed round."""
        self.names |= {TRAINED + name for name in event.metrics}

    def admitted(self, metrics: Metrics) -> Metrics:
        """Select the metrics of a reply that its event holds, before its round can say which names most replies carry.

        These are the names that the run has recorded. While the run has recorded no name of a kind, all names of this
        kind within the bounds are kept. The same holds for evaluation metrics while fewer than `FEWEST` devices have
        measured. The end of the round decides which of them count.
        """
        found = set[str]()
        for kind in (MEASURED, TRAINED):
            said = [name for name in metrics if name.startswith(kind)]
            known = [name for name in said if name in self.names]
            few = kind == MEASURED and len(self.measurers) < FEWEST
            if few or not any(name.startswith(kind) for name in self.names):
                known = sorted(name for name in said if may_be_recorded(name, kind))[:MAX_METRICS]
            found.update(known)
        return {name: metrics[name] for name in metrics if name in found}
