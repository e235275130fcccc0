"""Measure the gain of personal layers where labels differ: FedAvg, FedBN, FedPer and both, by client and its labels.

    python -m benchmarks.personal [--preset tiny|small|full] [--cells FILE] --json

Clients, split, local steps and learning rate are those of `benchmarks.drift`: ten clients share the digits by
dirichlet(0.1). All of them train in each round, and send their whole update. The MLP and the CNN have batch
normalization, and are the same for all methods. FedBN keeps it on the client, FedPer keeps the last layer, and
"FedBN and FedPer" keeps both.

A third of the digits is a common test set, from which no client trains. A client's accuracy is the mean over its labels
of the accuracy on that label's test examples, weighted by the label's share of the client's training examples: what to
expect on more examples like its own. It is that of the models of the last quarter of the rounds, with the client's
personal layers. This was decided before seeds from 21 on were looked at. Before, each client was measured on a fifth of
its own examples (seeds 11 to 14), and the worst clients had few. "FedBN and FedPer" was added after a look at the
digits with seeds 11 to 14 and 21 to 24, where either method alone gained less. Nothing was chosen by seeds from 31 on.

`mean` and `worst` are the mean and the least of the clients, means over the seeds. `worst_client_gain` is the worst
client's accuracy with the best of the three methods with personal layers, less that with FedAvg: the smaller one of
the two models. Simulated: all numbers come from seeds, and no clock. With `--cells` each run is kept in FILE, and a
second call makes only those that are missing.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.document import document, note, show
from benchmarks.drift import CLIENTS, LR, SPLIT, STEPS
from benchmarks.entry import arguments, end_what_we_started
from examples.digits import task as digits
from thinwire import simulate
from thinwire.client import ClientInfo, Split, own_part
from thinwire.core import RunPlan

FIRST_SEED = 31  # smaller ones were looked at before
TEST_SHARE = 1 / 3  # of the digits: 58 to 61 of each label
SIDE, CLASSES, HIDDEN, NARROW, WIDE = 8, 10, 128, 16, 32
FEDAVG, FEDBN, FEDPER, BOTH = "FedAvg", "FedBN", "FedPer", "FedBN and FedPer"
NORM, HEAD = "norm*", "head.*"
GLOBS: Mapping[str, tuple[str, ...]] = {FEDAVG: (), FEDBN: (NORM,), FEDPER: (HEAD,), BOTH: (NORM, HEAD)}


class Mlp(nn.Module):
    """A network with one hidden layer with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(SIDE * SIDE, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, pixels: Any) -> Any:
        return self.head(self.norm(self.body(pixels)).relu())


class Cnn(nn.Module):
    """Two convolutions with batch normalization, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(1, NARROW, 3, padding=1), nn.BatchNorm2d(NARROW)
        self.second, self.norm2 = nn.Conv2d(NARROW, WIDE, 3, padding=1), nn.BatchNorm2d(WIDE)
        self.head = nn.Linear(WIDE * SIDE * SIDE, CLASSES)

    def forward(self, pixels: Any) -> Any:
        images = pixels.reshape(-1, 1, SIDE, SIDE)
        images = self.norm1(self.first(images)).relu()
        return self.head(self.norm2(self.second(images)).relu().flatten(1))


MODELS: Mapping[str, Callable[[], nn.Module]] = {"digits": Mlp, "cnn": Cnn}


@dataclass(frozen=True)
class Preset:
    models: Sequence[str]
    seeds: int
    rounds: int


Cell = tuple[str, str, int, int]  # model, method, rounds, seed
EACH = tuple(MODELS)
PRESETS = {"tiny": Preset(("digits",), 1, 4), "small": Preset(EACH, 1, 12), "full": Preset(EACH, 8, 20)}


@functools.cache  # all clients of a process have the same
def common_test_set() -> NDArray[np.bool_]:
    """Return for each of the digits if it is in the test set: of each label the same share, the same in every run."""
    labels, chosen = digits.read_digits()[1], np.random.default_rng(0).permutation
    found = np.zeros(len(labels), bool)
    for label in range(CLASSES):
        of_label = chosen(np.flatnonzero(labels == label))
        found[of_label[: round(TEST_SHARE * len(of_label))]] = True
    return found


def data(client: ClientInfo) -> Split:
    """The client's part of what is no test set, and the test set with a weight for each example.

    The weights of a label's test examples sum to the label's share of the client's examples.
    """
    images, labels = digits.read_digits()
    pixels, classes = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    tested, rest = (np.flatnonzero(chosen) for chosen in (common_test_set(), ~common_test_set()))
    train = rest[own_part(labels[rest], client)]
    shares = np.bincount(labels[train], minlength=CLASSES) / len(train)
    weights = (shares / np.bincount(labels[tested], minlength=CLASSES))[labels[tested]]
    test = TensorDataset(pixels[tested], classes[tested], torch.tensor(weights))
    return Split(TensorDataset(pixels[train], classes[train]), test)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
    pixels, classes, weights = batch
    right = model(pixels).argmax(1) == classes
    return {"accuracy": (float(weights[right].sum()), float(weights.sum()))}


def plan_of(method: str, rounds: int, seed: int) -> RunPlan:
    return RunPlan.from_json({
        "run": {"task": "digits", "rounds": rounds, "seed": seed},
        "local": {"lr": LR, "steps": STEPS, "personal_layers": GLOBS[method]},
        "uplink": {"codec": "identity", "feedback": "none"},
    })  # fmt: skip


def measure_one(model: str, method: str, rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row a client: its accuracy over the last quarter of the rounds."""
    torch.set_num_threads(1)  # a process a core
    task = SimpleNamespace(model=MODELS[model], data=data, loss=loss, metrics=metrics)
    history = simulate(task, plan_of(method, rounds, seed), clients=CLIENTS, split=SPLIT)
    found = defaultdict[str, list[float]](list)
    for row in history.client_records():
        if int(row["round"]) > rounds - max(1, rounds // 4):
            found[str(row["client"])].append(float(row["eval/accuracy"]))
    shared = {"model": model, "method": method, "seed": seed}
    return [{**shared, "client": client, "accuracy": fmean(values)} for client, values in sorted(found.items())]


def measure(preset: Preset, workers: int, kept: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of all runs; those that the file `kept` has are not made again."""
    seeds = range(FIRST_SEED, FIRST_SEED + preset.seeds)
    cells = [(model, method, preset.rounds, seed) for model, seed, method in product(preset.models, seeds, GLOBS)]
    found = dict[Cell, list[dict[str, Any]]]()
    for line in kept.read_text().splitlines() if kept and kept.exists() else ():
        cell, rows = json.loads(line)
        found[tuple(cell)] = rows
    missing = [cell for cell in cells if cell not in found]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = pool.map(measure_one, *zip(*missing, strict=True)) if missing else ()
        for cell, rows in zip(missing, done, strict=True):
            worst = min(row["accuracy"] for row in rows)
            note(f"{cell[0]}, seed {cell[3]}, {cell[1]}: worst client {worst:.3f}")
            found[cell] = rows
            if kept:
                with open(kept, "a") as file:
                    file.write(json.dumps([cell, rows]) + "\n")
    return [row for cell in cells for row in found[cell]]


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures that follow from the rows."""
    of = defaultdict[tuple[str, str], dict[int, list[float]]](lambda: defaultdict(list))
    for row in rows:
        of[row["model"], row["method"]][row["seed"]].append(row["accuracy"])
    found, worst = dict[str, float](), dict[tuple[str, str], float]()
    for (model, method), seeds in of.items():
        worst[model, method] = fmean(map(min, seeds.values()))
        found[f"mean {model} {method}"] = fmean(map(fmean, seeds.values()))
        found[f"worst {model} {method}"] = worst[model, method]
    gains = {
        model: max(worst[model, method] for method in GLOBS if method != FEDAVG) - worst[model, FEDAVG]
        for model in {m for m, _ in worst}
    }
    found |= {f"worst_client_gain {model}": gains[model] for model in sorted(gains)}
    return found | {"worst_client_gain": min(gains.values())}


def main() -> None:
    parser = arguments("personal", __doc__ or "", PRESETS)
    parser.add_argument("--cells", type=Path, metavar="FILE", help="keep each run in this file of JSON lines")
    given = parser.parse_args()
    end_what_we_started()
    rows = measure(PRESETS[given.preset], len(os.sched_getaffinity(0)), given.cells)
    show(document("personal", given.preset, rows, figures(rows)), given.json)


if __name__ == "__main__":
    main()
