"""What devices train from, as the journal says: the versions that there are, and who was asked from which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.events import Evaluated, Event, ModelStored, RoundClosed, RoundOpened, ShadowStored, UpdateAccepted
from thinwire.core.serialization import MAX_METRIC_LETTERS, MAX_METRICS
from thinwire.core.types import Metrics


@dataclass
class Bases:
    """`kept`: versions that are remembered."""

    kept: int
    model: ModelStored | None = None  # the newest
    models: dict[int, ModelStored] = field(default_factory=dict)  # version -> the model
    shadow: ShadowStored | None = None  # of the newest version; None: devices hold the model itself
    changes: dict[int, ShadowStored] = field(default_factory=dict)  # version -> the change that leads to it
    made_by: dict[int, int] = field(default_factory=lambda: {0: 0})  # version -> the round that made it
    asked_from: dict[int, int] = field(default_factory=dict)  # round -> the version that its asks train from
    held: dict[str, int] = field(default_factory=dict)  # device -> the version that its last answer was made from

    @property
    def version(self) -> int:
        return self.model.version if self.model else 0

    @property
    def newest(self) -> ModelStored | ShadowStored:
        """The newest version as devices hold it."""
        assert self.model is not None, "a run that is driven has a model"
        return self.shadow or self.model

    def of(self, asked_round: int) -> ModelStored | ShadowStored:
        """What the asks of a round trained from, as devices hold it."""
        version = self.asked_from[asked_round]
        return self.changes.get(version) or self.models[version]

    def apply(self, event: Event) -> None:
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
    """Whether a round moved the model."""
    return closed.reason not in ("too-few", "stopped")


# How good each version is, as the journal says: what answers measured of it, and what that came to.


FEWEST = 3  # devices: of two that differ nobody knows which one to believe
MEASURED, TRAINED = "eval/", "train/"  # what a metric's name begins with: of the model that was sent, and of training


def may_be_recorded(name: str, kind: str) -> bool:
    """Whether a metric's name is one of this kind, and within the bound of a name. A simulation reads no messages."""
    return name.startswith(kind) and 0 < len(name) - len(kind) <= MAX_METRIC_LETTERS


class Measured(NamedTuple):
    """One reply's metrics. `examples` are those that it trained on; 0: it only measured."""

    update_id: str
    device: str
    examples: int
    metrics: Metrics


@dataclass
class Scores:
    """`kept`: versions whose measurements wait to be evaluated."""

    kept: int
    measured: dict[int, list[Measured]] = field(default_factory=dict)  # version -> by answers, until it is evaluated
    evaluated: dict[int, dict[str, float]] = field(default_factory=dict)  # version -> what `best` and `target` go by
    best: Evaluated | None = None
    by_few: set[int] = field(default_factory=set)  # versions that too few measured to go by
    most: int = 0  # clients that measured one version
    measurers: set[str] = field(default_factory=set)  # devices whose measurements of some version were evaluated
    names: set[str] = field(default_factory=set)  # of all metrics that were recorded, with their kind
    units: dict[str, float] = field(default_factory=dict)  # metric -> what one example of training counts in it
    widths: dict[str, float] = field(default_factory=dict)  # metric -> the largest so far of measured.py's w
    examples: dict[str, int] = field(default_factory=dict)  # device -> the most that it said to have trained on

    def measure(self, event: UpdateAccepted, newest: int) -> None:
        """What an answer says of a version that is not evaluated yet; `newest`: the model's version meanwhile."""
        version, metrics = int(event.head.get("base_version", 0)), event.head.get("metrics", {})
        examples = int(event.head.get("examples", 0))
        self.examples[event.device] = max(examples, self.examples.get(event.device, 0))
        if version not in self.evaluated and any(name.startswith(MEASURED) for name in metrics):
            found = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
            reply = Measured(event.update_id, event.device, examples, found)
            self.measured.setdefault(version, []).append(reply)
            self.measured.pop(newest - self.kept, None)

    def evaluate(self, event: Evaluated) -> None:
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
        self.names |= {TRAINED + name for name in event.metrics}

    def admitted(self, metrics: Metrics) -> Metrics:
        """Select the metrics of a reply that its event holds, before its round can say which names most replies carry.

        These are the names that the run has recorded. While it has recorded none of a kind, or fewer than FEWEST
        devices have measured, all names of this kind within the bounds are held: the round's end says which count.
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
