"""Holds the model versions of a run and their evaluations, rebuilt from the journal.

`ModelHistory` knows which versions there are, and from which one each device trained. `EvaluationLog` knows how good
each version is: the measurements in the replies, and the evaluation that follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.events import NO_STEP, Evaluated, Event, ModelStored, ReplicaStored, RoundClosed, UpdateAccepted
from thinwire.core.run_events import RunExtended
from thinwire.core.score_histogram import MAX_METRIC_LETTERS, MEASURED, TRAINED, Histograms
from thinwire.core.serialization import MAX_METRICS
from thinwire.core.types import Metrics


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
