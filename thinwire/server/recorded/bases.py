"""What devices train from, as the journal says: the versions that there are, and who was asked from which."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.events import Event, ModelStored, RoundClosed, RoundOpened, ShadowStored, UpdateAccepted


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
