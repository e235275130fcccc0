"""What is asked of a bench, and what it gives back: plain values, so that they can cross from process to process."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .layout import Key
from .schedule import CONSTANT, Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .evaluate import Sums


if TYPE_CHECKING:
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


# How the two processes speak over their socket: a JSON head behind its length, then vectors of float32 as they are.
#
#     4 bytes, little-endian: the head's length | the head | the bytes of each of head["vectors"], counts of float32
#
# Law: nothing is allocated by what the other side says. A head has at most `MOST_HEAD` bytes, and vectors have the
# counts that the reader works out from the model's tensors. Nothing is pickled: neither side can make the other run
# anything.


MOST_HEAD = 16 << 20  # a model of some hundred thousand tensors
LENGTH = struct.Struct("<I")


class BadFrame(Exception):
    """What came is not what it must be; the other process is of no use any more."""


class Wire:
    """One end. Each side is used by one thread; `EOFError` when the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, head: Mapping[str, Any], *vectors: Vector) -> None:
        data = json.dumps({**head, "vectors": [v.size for v in vectors]}, separators=(",", ":")).encode()
        if len(data) > MOST_HEAD:
            raise BadFrame(f"a head of {len(data)} bytes")
        try:
            self.sock.sendall(LENGTH.pack(len(data)) + data)
            for vector in vectors:
                self.sock.sendall(vector.astype("<f4", "C", copy=False).data.cast("B"))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def head(self) -> dict[str, Any]:
        """The next head; its vectors must be taken before the next one."""
        (length,) = LENGTH.unpack(self._exactly(bytearray(LENGTH.size)))
        if length > MOST_HEAD:
            raise BadFrame(f"a head of {length} bytes")
        try:
            found = json.loads(bytes(self._exactly(bytearray(length))))
        except (ValueError, RecursionError) as error:
            raise BadFrame("a head that is no JSON") from error
        if not isinstance(found, dict) or not isinstance(found.get("vectors"), list):
            raise BadFrame("a head that is none")
        return found

    def vectors(self, head: Mapping[str, Any], sizes: Sequence[int]) -> list[Vector]:
        """The head's vectors, when they have these sizes; `BadFrame` before anything is allocated."""
        if head["vectors"] != list(sizes):
            raise BadFrame(f"vectors of {str(head['vectors'])[:80]} floats instead of {list(sizes)}")
        import numpy as np  # not before: a Python without it must be able to say so

        found = []
        for size in sizes:
            vector: Vector = np.empty(size, np.float32)
            if size:
                self._exactly(vector.data.cast("B"))
            found.append(vector)
        return found

    def _exactly(self, into: bytearray | memoryview) -> bytearray | memoryview:
        view, at = memoryview(into), 0
        while at < len(view):
            try:
                count = self.sock.recv_into(view[at:])
            except ConnectionResetError as error:
                raise EOFError from error
            if not count:
                raise EOFError
            at += count
        return into


# Where a task's code is running, and what it gives back there.


@dataclass(frozen=True)
class Site:
    """One place with data: a device (part 0 of 1 unless `--partition` says otherwise) or a simulated client.

    Nothing else differs between the two: `data` is what `--data` named, `split` how parts are cut, `seed` the split's.
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
    """Data to train on and data to be measured on; each a Dataset or a DataLoader."""

    train: Any
    test: Any = None


# The plan's section [local] in plain values: what a trainer and a task's own functions are given.


THINWIRE, TASK, REFUSED = "Thinwire", "the function", "refused"  # who carries a key out


class Work(NamedTuple):
    """How much is asked for; 0 steps: the plan decides (`epochs`)."""

    steps: int = 0
    batch: int = 32


@dataclass(frozen=True)
class Local:
    """The keys of `core/plan_schema.py`, by the same names and with the same defaults (a test)."""

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
    partial: bool = False
    overlap: dict[str, Any] | None = None
    durability: str = "round"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Local:
        """Of a plan's JSON; keys that a newer plan has are left out: what must be carried out is checked before."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


class Carried(NamedTuple):
    """Who carries out a key of [local] where the task has its own `optimizer()`, and where it has its own `train()`.

    The function finds the whole section in `local`. `values` are refused although others are carried out.
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
    "schedule": Carried(THINWIRE, REFUSED),
    "lr_warmup": Carried(THINWIRE, REFUSED),
    "lr_end": Carried(THINWIRE, REFUSED),
    "clip_grad": Carried(THINWIRE, REFUSED),
    "prox": Carried(THINWIRE, REFUSED),
    "buffers": Carried(THINWIRE, THINWIRE, ("frozen",)),
    "partial": Carried(THINWIRE, REFUSED),
    "overlap": Carried(THINWIRE, REFUSED),
    "durability": Carried(THINWIRE, THINWIRE),
}
OWN_LOOP = "the whole loop is the task's, and Thinwire cannot see whether train() does it"


def ignored(local: Local, defines: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Give (what, why, try) for each request of [local] that nothing would carry out.

    `defines` are the names of the functions that the task has. A key with its default value requests nothing.
    """
    whole, own = "train" in defines, "optimizer" in defines
    for key in dataclasses.fields(local):
        value, carried = getattr(local, key.name), CARRIED[key.name]
        if value == key.default:
            continue
        said = f"[local] {key.name} = {_toml(value)}"
        if whole and (carried.train == REFUSED or value in carried.values):
            yield (
                f"{said} with a task that has its own train()",
                OWN_LOOP,
                f"leave {key.name} out of the plan, or train() out of the task",
            )
        elif not whole and local.optimizer == "task" and carried.optimizer == REFUSED:
            yield (
                f'{said} with optimizer = "task"',
                "optimizer() makes the whole optimizer",
                f"leave {key.name} out of the plan",
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
