"""Requests to the worker and its results as plain values, and the plan's section [local]."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .layout import Key
from .schedule import CONSTANT, Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]
    Arrays = Mapping[str, NDArray[Any]]
    Sums = dict[str, tuple[float, float]]  # of a metric: its sum and its count
    OnProgress = Callable[[str, int, int], None]  # stage ("load", "measure", "train"), steps done, all (0: unknown)


class PrivateSteps(NamedTuple):
    """The numbers of DP-SGD on a device: `[privacy] mode = "example"`.

    Each record is in the batch of a step with the probability `rate`. The gradients of a batch, each clipped to an L2
    norm of `clip` (`scale` steps of a grid), are summed over `dimensions` coordinates. The sum gets integer noise of
    `variance`, in squared steps of the grid, and is divided by `batch`.
    """

    steps: int
    batch: int
    rate: float
    clip: float
    scale: float
    variance: float
    dimensions: int


@dataclass(frozen=True)
class TrainRequest:
    """A request to evaluate the model, to train it, or to evaluate it and then train it.

    `counters` are the model's integer buffers. `shift`, of the model's size, is added to the gradient of every step.
    With `first`, the worker makes the initial model instead; the run's seed is the first word of `key`. With `private`,
    its number of steps replaces that of `work`.

    `personal` are the tensors that stay on the client: parameters and buffers of request and result are without them.
    `kept` holds their floats, parameters first, and is None for a client that has trained none yet.

    `round`, `version`, `may_report` and `state` are for a task's own train() (`Context`), which may leave at most
    `max_state_bytes` in its state. With `may_diverge` a loss that is not finite is no error: no reply may tell of it.
    """

    measure: bool
    train: bool
    local: Local
    work: Work
    key: Key
    counters: Mapping[str, int] = field(default_factory=dict)
    schedule: Schedule = CONSTANT
    within_s: float | None = None  # training ends this long after the request arrived, with the steps done by then
    shift: Vector | None = None
    first: bool = False
    private: PrivateSteps | None = None
    personal: tuple[str, ...] = ()
    kept: Vector | None = None
    round: int = 1
    version: int = 0
    may_report: bool = True
    may_diverge: bool = False
    max_state_bytes: int = 0
    state: Arrays = field(default_factory=dict)

    def after(self, seconds: float) -> TrainRequest:
        """Return the same request with `seconds` less time to train."""
        return self if self.within_s is None else replace(self, within_s=self.within_s - seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON without the vectors `shift` and `kept` and the arrays `state`."""
        return {
            "measure": self.measure, "train": self.train, "local": vars(self.local), "work": list(self.work),
            "key": list(self.key), "counters": dict(self.counters),
            "schedule": vars(self.schedule), "within_s": self.within_s,
            "first": self.first, "private": None if self.private is None else list(self.private),
            "personal": list(self.personal), "round": self.round, "version": self.version,
            "may_report": self.may_report, "may_diverge": self.may_diverge, "max_state_bytes": self.max_state_bytes,
        }  # fmt: skip

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TrainRequest:
        """Parse the JSON of `to_json`."""
        return cls(
            bool(raw["measure"]), bool(raw["train"]), Local.of(raw["local"]), Work(*raw["work"]), Key(*raw["key"]),
            dict(raw["counters"]), Schedule(**raw["schedule"]),
            None if raw["within_s"] is None else float(raw["within_s"]), first=bool(raw["first"]),
            private=None if raw["private"] is None else PrivateSteps(*raw["private"]),
            personal=tuple(map(str, raw["personal"])), round=int(raw["round"]), version=int(raw["version"]),
            may_report=bool(raw["may_report"]), may_diverge=bool(raw["may_diverge"]),
            max_state_bytes=int(raw["max_state_bytes"]),
        )  # fmt: skip


@dataclass
class TrainResult:
    """Holds the result of one request.

    `params` and `buffers` belong to the trained model, `sums` to the given one as {name: (sum, count)}. `loss` is (sum,
    count) over the batches trained on; `a` is the FedNova normalizer. `planned` is the number of steps of the whole
    work, 0 if it is not known. `reported` are the sums and counts that a task's own train() reported, and `state` is
    what it left in `context.state`; None without such a train(). Seconds are measured by this machine's clock; `load_s`
    are those from the request until evaluation or training began.
    """

    sums: Sums = field(default_factory=dict)
    load_s: float = 0.0
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
    kept: Vector | None = None  # the floats of the personal tensors after training
    reported: Sums = field(default_factory=dict)
    state: Arrays | None = None
    histograms: dict[str, list[list[int]]] = field(default_factory=dict)  # of scores, by name (scores.py)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON without its vectors and arrays."""
        return {name: value for name, value in vars(self).items() if name not in ("params", "buffers", "kept", "state")}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TrainResult:
        """Parse the JSON of `to_json`; raise KeyError, TypeError or ValueError if it is invalid."""
        sums, reported = (
            {str(name): (float(total), float(count)) for name, (total, count) in raw[kind].items()}
            for kind in ("sums", "reported")
        )
        counters = {str(name): int(value) for name, value in raw["counters"].items()}
        loss = (float(raw["loss"][0]), float(raw["loss"][1]))
        histograms = {
            str(name): [[int(n) for n in counts] for counts in classes] for name, classes in raw["histograms"].items()
        }
        return cls(
            sums, float(raw["load_s"]), float(raw["measure_s"]), float(raw["train_s"]), int(raw["examples"]),
            int(raw["steps"]), float(raw["a"]), loss, int(raw["planned"]), counters, reported=reported,
            histograms=histograms,
        )  # fmt: skip


@dataclass(frozen=True)
class ClientInfo:
    """Describes a client to its task: a device (part 0 of 1 unless `--partition` is given) or a simulated client.

    The two differ in nothing else. `data` is the path of `--data`, `split` the name of the partitioner, `seed` the seed
    of the split.
    """

    name: str = "here"
    data: Path | None = None
    partition: int = 0
    partitions: int = 1
    split: str = "iid"
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Split:
    """Training data and test data; each is a Dataset or a DataLoader."""

    train: Any
    test: Any = None


THINWIRE, TASK, REFUSED = "Thinwire", "the function", "refused"  # the party that carries out a key of [local]


class Work(NamedTuple):
    """The amount of work of one request; with 0 steps the plan's `epochs` decide."""

    steps: int = 0
    batch: int = 32


@dataclass(frozen=True)
class Local:
    """The plan's section [local] as plain values, which a trainer and a task's own functions receive.

    A test holds names and defaults equal to those of `core/plan_schema.py`.
    """

    lr: float
    steps: int | str | None = None
    epochs: float | None = None
    min_steps: int = 1
    codec_threads: int = 0
    batch: int = 32
    accumulate: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    lr_warmup: float = 0.0
    lr_end: float = 0.0
    clip_grad: float | None = None
    prox: float = 0.0
    buffers: str = "average"
    personal_layers: Sequence[str] = ()
    partial: bool = False
    overlap: dict[str, Any] | None = None
    durability: str = "round"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Local:
        """Read the section from a plan's JSON.

        Unknown keys of a newer plan are left out: the caller has checked before that this client can carry the plan
        out.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


class Carried(NamedTuple):
    """The party that carries out a key of [local] if the task has its own `optimizer()` or its own `train()`.

    The task's optimizer() finds the whole section in its argument `local`, its train() in `context.local`. `values` are
    refused even if other values of the key are carried out.
    """

    optimizer: str
    train: str
    values: tuple[Any, ...] = ()


CARRIED = {
    "lr": Carried(TASK, TASK),
    "steps": Carried(THINWIRE, TASK, ("auto",)),
    "epochs": Carried(THINWIRE, TASK),
    "min_steps": Carried(THINWIRE, REFUSED),
    "codec_threads": Carried(THINWIRE, THINWIRE),
    "batch": Carried(THINWIRE, TASK),
    "accumulate": Carried(THINWIRE, REFUSED),
    "optimizer": Carried(THINWIRE, REFUSED),
    "momentum": Carried(REFUSED, REFUSED),
    "weight_decay": Carried(TASK, REFUSED),
    "schedule": Carried(THINWIRE, TASK),
    "lr_warmup": Carried(THINWIRE, TASK),
    "lr_end": Carried(THINWIRE, TASK),
    "clip_grad": Carried(THINWIRE, REFUSED),
    "prox": Carried(THINWIRE, REFUSED),
    "buffers": Carried(THINWIRE, THINWIRE, ("frozen",)),
    "personal_layers": Carried(THINWIRE, THINWIRE),
    "partial": Carried(THINWIRE, TASK),
    "overlap": Carried(THINWIRE, TASK),
    "durability": Carried(THINWIRE, THINWIRE),
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Local)}
OWN_LOOP = "the whole loop is the task's, and Thinwire cannot see whether train() does it"


def ignored(local: Local, defines: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (what, why, try) for each request of [local] that nothing would carry out.

    `defines` are the names of the functions that the task has. A key with its default value requests nothing.
    """
    whole, own = "train" in defines, "optimizer" in defines
    for name in [name for name, value in vars(local).items() if value != DEFAULTS[name]]:
        value, carried = getattr(local, name), CARRIED[name]
        if whole and (carried.train == REFUSED or value in carried.values):
            yield (
                f"[local] {name} = {_toml(value)} with a task that has its own train()",
                OWN_LOOP,
                f"leave {name} out of the plan, or train() out of the task",
            )
        elif not whole and local.optimizer == "task" and carried.optimizer == REFUSED:
            yield (
                f'[local] {name} = {_toml(value)} with optimizer = "task"',
                "optimizer() makes the whole optimizer",
                f"leave {name} out of the plan",
            )
    if own and not whole and local.optimizer != "task":
        yield (
            f"the task has its own optimizer(), and [local] optimizer = {_toml(local.optimizer)}",
            "optimizer() would never be called",
            '[local] optimizer = "task", or leave optimizer() out of the task',
        )
    if local.optimizer == "task" and not (own or whole):
        yield (
            '[local] optimizer = "task" with a task that has no optimizer(params, local)',
            "optimizer() makes the optimizer",
            '[local] optimizer = "sgd"',
        )


def _toml(value: Any) -> str:
    return "{ ... }" if isinstance(value, Mapping) else json.dumps(value)
