"""What is asked of a bench, and what it gives back: plain values, so that they can cross from process to process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .keys import Key
from .local import Local, Work
from .schedule import CONSTANT, Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .evaluate import Sums

    Vector = NDArray[np.float32]
    Tell = Callable[[str, int, int], None]  # "measure" or "train", steps done, steps in all (0: not known)


@dataclass(frozen=True)
class Order:
    """Measure the model, train it, or one after the other. `counters` are the model's integer buffers.

    `shift`, of the model's size, is added to the gradient of every step. `first`: neither, but make the model itself,
    from the run's seed, which is the key's first word.
    """

    measure: bool
    train: bool
    local: Local
    work: Work
    key: Key
    counters: Mapping[str, int] = field(default_factory=dict)
    slow_step_s: float = 0.0  # the demo's slow client
    schedule: Schedule = CONSTANT
    within_s: float | None = None  # training ends so long after this order was taken up, with what was done by then
    shift: Vector | None = None
    first: bool = False

    def after(self, seconds: float) -> Order:
        """The same order, so much later."""
        return self if self.within_s is None else replace(self, within_s=self.within_s - seconds)

    def to_json(self) -> dict[str, Any]:
        """All but the vector."""
        return {
            "measure": self.measure, "train": self.train, "local": vars(self.local), "work": list(self.work),
            "key": list(self.key), "counters": dict(self.counters), "slow_step_s": self.slow_step_s,
            "schedule": vars(self.schedule), "within_s": self.within_s,
            "first": self.first,
        }  # fmt: skip

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Order:
        return cls(
            bool(raw["measure"]), bool(raw["train"]), Local.of(raw["local"]), Work(*raw["work"]), Key(*raw["key"]),
            dict(raw["counters"]), float(raw["slow_step_s"]), Schedule(**raw["schedule"]),
            None if raw["within_s"] is None else float(raw["within_s"]), first=bool(raw["first"]),
        )  # fmt: skip


@dataclass
class Done:
    """What came of it. `params` and `buffers` are the trained model's, `sums` the given one's: {name: (sum, count)}.

    `loss` is (sum, count) over the batches trained on; `a` the normaliser; `planned` the steps of the whole work, 0
    where that is not known. Seconds by this machine's clock.
    """

    sums: Sums = field(default_factory=dict)
    measure_s: float = 0.0
    train_s: float = 0.0
    examples: int = 0
    steps: int = 0
    a: float = 0.0
    loss: tuple[float, float] = (0.0, 0.0)
    planned: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    params: Vector | None = None
    buffers: Vector | None = None

    def to_json(self) -> dict[str, Any]:
        """All but the vectors."""
        return {name: value for name, value in vars(self).items() if name not in ("params", "buffers")}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Done:
        """KeyError, TypeError or ValueError where it is none."""
        sums = {str(name): (float(total), float(count)) for name, (total, count) in raw["sums"].items()}
        counters = {str(name): int(value) for name, value in raw["counters"].items()}
        loss = (float(raw["loss"][0]), float(raw["loss"][1]))
        return cls(
            sums, float(raw["measure_s"]), float(raw["train_s"]), int(raw["examples"]), int(raw["steps"]),
            float(raw["a"]), loss, int(raw["planned"]), counters,
        )  # fmt: skip
