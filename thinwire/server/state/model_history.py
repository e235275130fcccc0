"""Holds the model versions of a run and their evaluations, rebuilt from the journal.

`ModelHistory` knows which versions there are, and from which one each round and device trained. `EvaluationLog` knows
how good each version is: the measurements in the replies, and the evaluation that follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.events import Evaluated, Event, ModelStored, RoundClosed, RoundOpened, ShadowStored, UpdateAccepted
from thinwire.core.serialization import MAX_METRIC_LETTERS, MAX_METRICS
from thinwire.core.types import Metrics


@dataclass
class ModelHistory:
    """Holds the last `kept` model versions as devices hold them, and which version each round and device trained from.

    If the downlink is compressed, devices hold a replica of the model instead of the model itself.
    """

    kept: int
    model: ModelStored | None = None  # the latest
    models: dict[int, ModelStored] = field(default_factory=dict)  # version -> its model
    shadow: ShadowStored | None = None  # replica of the latest version; None: devices hold the model itself
    changes: dict[int, ShadowStored] = field(default_factory=dict)  # version -> its replica and downlink update
    made_by: dict[int, int] = field(default_factory=lambda: {0: 0})  # version -> the round that made it
    asked_from: dict[int, int] = field(default_factory=dict)  # round -> the version that its assignments train from
    held: dict[str, int] = field(default_factory=dict)  # device -> the version that its last reply trained from

    @property
    def version(self) -> int:
        """Return the number of the latest model version; 0 before there is a model."""
        return self.model.version if self.model else 0

    @property
    def newest(self) -> ModelStored | ShadowStored:
        """Return the latest version as devices hold it: its replica if there is one, else the model itself."""
        assert self.model is not None, "a run that is driven has a model"
        return self.shadow or self.model

    def of(self, asked_round: int) -> ModelStored | ShadowStored:
        """Return the version that the assignments of a round trained from, as devices hold it."""
        version = self.asked_from[asked_round]
        return self.changes.get(version) or self.models[version]

    def apply(self, event: Event) -> None:
        """Record an event that stores a model version, trains from one or makes one."""
        match event:
            case ModelStored():
                self.model, self.shadow = event, None
                self.models[event.version] = event
                self.models.pop(event.version - self.kept, None)
            case ShadowStored():
                self.shadow = self.changes[event.version] = event
                self.changes.pop(event.version - self.kept, None)
            case RoundOpened():
                self.asked_from[event.round] = event.base_version
            case UpdateAccepted():
                self.held[event.device] = int(event.head.get("base_version", 0))
            case RoundClosed() if made_step(event):
                self.made_by[event.version] = event.round


def made_step(closed: RoundClosed) -> bool:
    """Return True if the round changed the model."""
    return closed.reason not in ("too-few", "stopped")


FEWEST = 3  # devices: if two differ, nothing says which one is right
MEASURED, TRAINED = "eval/", "train/"  # prefixes of metrics: of the model that was sent, and of training


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


@dataclass
class EvaluationLog:
    """Holds the evaluations of model versions, and the measurements of at most `kept` versions that are not evaluated
    yet.
    """

    kept: int
    measured: dict[int, list[Measured]] = field(default_factory=dict)  # version -> until it is evaluated
    evaluated: dict[int, dict[str, float]] = field(default_factory=dict)  # version -> metrics that `best`, `target` use
    best: Evaluated | None = None
    by_few: set[int] = field(default_factory=set)  # versions measured by too few to be best or meet a target
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
        version, metrics = int(event.head.get("base_version", 0)), event.head.get("metrics", {})
        examples = int(event.head.get("examples", 0))
        self.examples[event.device] = max(examples, self.examples.get(event.device, 0))
        if version not in self.evaluated and any(name.startswith(MEASURED) for name in metrics):
            found = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
            reply = Measured(event.update_id, event.device, examples, found)
            self.measured.setdefault(version, []).append(reply)
            self.measured.pop(newest - self.kept, None)

    def evaluate(self, event: Evaluated) -> None:
        """Record the evaluation of a version, and forget the measurements that it is made from."""
        self.evaluated[event.version] = event.decisive
        self.measurers |= {reply.device for reply in self.measured.pop(event.version, ())}
        self.most = max(self.most, event.clients)
        self.names |= {MEASURED + name for name in event.metrics}
        self.units |= event.units
        self.widths |= event.widths
        if event.few:
            self.by_few.add(event.version)
        if event.best:
            self.best = event

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
