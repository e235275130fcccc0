"""Run one simulation with hostile clients, for `benchmarks.robust`.

Hostile clients know the honest updates of their round, as ALIE and IPM suppose it. `Attacked` therefore stands before
the reduction and replaces the rows of hostile clients. Label flip and backdoor are in their data, as they would be on a
device; the backdoor's update is scaled besides. Where Flower has the same reduction, it gets the same rows.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from thinwire import simulate
from thinwire.aggregation import CoordinateWise, Reduction, UpdateRows
from thinwire.aggregation.reductions import reduction_of
from thinwire.client import ClientInfo, Split
from thinwire.core.types import Vector

from flwr.server.strategy import aggregate as flower  # isort: skip

CLIENTS, HOSTILE = 20, 6  # 30 %
LR = 0.1  # of all cells: with 0.3 the mean of the CNN diverges without hostile clients
TARGET, CLASSES = 0, 10  # what the backdoor's trigger is to be taken for
TRIGGER = slice(0, 3)  # the first pixels of an image, which are white where it is stamped
Rows = NDArray[np.float32]
Attack = Callable[[Rows, Rows, np.random.Generator], Rows]  # of the honest updates and their own ones


def alie(honest: Rows, own: Rows, _: np.random.Generator) -> Rows:
    """A little is enough (Baruch et al. 2019): the mean, moved by as many deviations as stay among the nearest."""
    supporters = CLIENTS // 2 + 1 - HOSTILE
    z = statistics.NormalDist().inv_cdf((len(honest) - supporters) / len(honest))
    return np.repeat([honest.mean(axis=0) - np.float32(z) * honest.std(axis=0)], len(own), axis=0)


ATTACKS: Mapping[str, Attack] = {
    "none": lambda honest, own, rng: own,
    "sign flip": lambda honest, own, rng: -4 * own,
    "gaussian": lambda honest, own, rng: (10 * honest.std() * rng.standard_normal(own.shape)).astype(np.float32),
    "alie": alie,
    "ipm": lambda honest, own, rng: np.repeat([-honest.mean(axis=0) / 2], len(own), axis=0),  # Xie et al. 2019
    "label flip": lambda honest, own, rng: own,
    "backdoor": lambda honest, own, rng: own * np.float32(CLIENTS / HOSTILE),  # model replacement, Bagdasaryan 2020
}
FLOWERS: Mapping[str, Callable[[list[Any]], list[Any]]] = {
    "median": flower.aggregate_median,
    "trimmed(0.3)": lambda results: flower.aggregate_trimmed_avg(results, 0.3),
    f"krum({HOSTILE})": lambda results: flower.aggregate_krum(results, HOSTILE, 0),
    f"multi-krum({HOSTILE}, 12)": lambda results: flower.aggregate_krum(results, HOSTILE, 12),
}
HONEST = "honest"  # the mean of the honest updates alone: what the data of hostile clients are worth
# Honest updates are 0.06 to 0.01 from their mean: 0.02 is in the middle, as its users would choose it.
REDUCTIONS = ("mean", HONEST, *FLOWERS, "geometric-median", "clipped(0.02)")


class Mean(CoordinateWise):
    """The unweighted mean, which withstands no hostile client."""

    def of_block(self, rows: Rows) -> Vector:
        found: Vector = rows.mean(axis=0)
        return found


def is_hostile(client: str) -> bool:
    """Return True if a simulated client, sim-0 .. sim-19, is one of the hostile ones."""
    return int(client.rpartition("-")[2]) < HOSTILE


@dataclass
class Attacked(Reduction):
    """A reduction whose hostile rows are replaced; `apart` is the greatest difference to Flower's own function."""

    spec: str
    attack: str
    seed: int
    apart: float = 0.0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def reduce(self, updates: UpdateRows) -> Vector:
        names = sorted(updates.ids)
        rows = np.concatenate([block.copy() for _, block in updates.blocks()], axis=1)
        hostile = np.array([is_hostile(name) for name in names])
        rows[hostile] = ATTACKS[self.attack](rows[~hostile], rows[hostile], self.rng)
        changed = UpdateRows(Path(tempfile.gettempdir()), updates.size)
        for name, row in zip(names, rows, strict=True):
            changed.add(name, [row])
        if self.spec == HONEST:
            return np.asarray(rows[~hostile].mean(axis=0))
        found = (Mean() if self.spec == "mean" else reduction_of(self.spec)).reduce(changed)
        if self.spec in FLOWERS:
            theirs = FLOWERS[self.spec]([([row], 1) for row in rows])[0]
            self.apart = max(self.apart, float(np.abs(found - theirs).max()))
        return found


class HostileTask:
    """A task of `benchmarks.accuracy_bytes` whose hostile clients have other labels, or a trigger in their images."""

    def __init__(self, name: str, attack: str) -> None:
        self.inner, self.attack = import_module(f"benchmarks.accuracy_bytes.tasks.{name}"), attack

    def model(self) -> nn.Module:
        made: nn.Module = self.inner.model()
        return made

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.inner.loss(model, batch)
        return found

    def data(self, client: ClientInfo) -> Split:
        split: Split = self.inner.data(client)
        if client.partition >= HOSTILE or self.attack not in ("label flip", "backdoor"):
            return split
        pixels, labels = (values.clone() for values in split.train[:])
        if self.attack == "label flip":
            return Split(TensorDataset(pixels, CLASSES - 1 - labels), split.test)
        pixels[::2, TRIGGER], labels[::2] = 1.0, TARGET
        return Split(TensorDataset(pixels, labels), split.test)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
        """Accuracy, and of images of other classes the share that the trigger turns into the target."""
        pixels, labels = batch
        right = (model(pixels).argmax(1) == labels).sum()
        stamped = pixels[labels != TARGET].clone()
        stamped[:, TRIGGER] = 1.0
        turned = (model(stamped).argmax(1) == TARGET).sum() if len(stamped) else torch.tensor(0)
        return {"accuracy": (float(right), len(labels)), "backdoor": (float(turned), max(1, len(stamped)))}


def measure_one(task: str, split: str, attack: str, spec: str, seed: int, rounds: int) -> dict[str, Any]:
    """The last model's metrics of one run."""
    plan = {
        "run": {"task": task, "rounds": rounds, "seed": seed, "evaluate_every": rounds, "metric": "accuracy"},
        "cohort": {"late": "drop"},
        "local": {"lr": LR, "steps": 10, "batch": 32},
        "uplink": {"codec": "identity"},
    }
    reduction = Attacked(spec, attack, seed)
    history = simulate(HostileTask(task, attack), plan, clients=CLIENTS, split=split, reduce=reduction)
    assert history.run.status == "done", history.run.status_text
    named = {"task": task, "split": split, "attack": attack, "reduce": spec, "seed": seed, "rounds": rounds}
    return {
        **named,
        **{name: history.metrics[name] for name in ("accuracy", "backdoor")},
        "flower_apart": reduction.apart,
    }
