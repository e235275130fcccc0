"""`eden(b)` below one bit with a rotation of its own for each client, and with one that all clients of a round share.

    python -m benchmarks.shared_rotation [--preset small|full] --json

With a shared rotation an aggregator could add what it receives before it rotates back, once a round. But clients that
learn alike then err alike: the error of one update is as small as before, that of their mean no longer falls with their
number. The digits are cut over the clients, all of whom take part in each round. A row has the error of the mean
update over its squared norm (`own_error`, `shared_error`: means over rounds and seeds), the accuracy after the last
round, and fp32's. The figures are `error_ratio_N`, shared over own for N clients with equal data at 0.1 bits, and
`time_ratio`, the CPU time to add an update whose rotation is its own over that to add one in the rotated domain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from benchmarks.document import note
from benchmarks.entry import run_in_folder
from thinwire.client.train.partitions import partition
from thinwire.compression.codecs.drive_eden import SparseEden
from thinwire.compression.codecs.pack_zstd import nonzero
from thinwire.core.types import Vector

COHORTS, SPLITS, RATES = (4, 16, 64), ("iid", "dirichlet(0.3)"), ("0.5", "0.1")
STEPS, BATCH, LR = 5, 32, 0.5
TIMED = 1 << 24


@dataclass(frozen=True)
class Preset:
    seeds: int
    rounds: int
    cohorts: tuple[int, ...] = COHORTS
    timed: int = TIMED


PRESETS = {"tiny": Preset(1, 1, (4,), 1 << 18), "small": Preset(2, 20), "full": Preset(8, 30)}


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row for each split, number of clients and b, and the figures."""
    del folder
    torch.set_num_threads(1)
    rows, figures = [], dict[str, float]()
    for split in SPLITS:
        for clients in preset.cohorts:
            fp32 = statistics.fmean(train(split, clients, None, False, seed, preset)[0] for seed in range(preset.seeds))
            for rate in RATES:
                row: dict[str, Any] = {"split": split, "clients": clients, "bits": float(rate), "fp32_accuracy": fp32}
                for name, shared in (("own", False), ("shared", True)):
                    codec = SparseEden(rate=Decimal(rate))
                    found = [train(split, clients, codec, shared, seed, preset) for seed in range(preset.seeds)]
                    row[f"{name}_accuracy"] = statistics.fmean(accuracy for accuracy, _ in found)
                    row[f"{name}_error"] = statistics.fmean(error for _, error in found)
                rows.append(row)
                note(str(row))
                if split == "iid" and rate == RATES[-1]:
                    figures[f"error_ratio_{clients}"] = row["shared_error"] / row["own_error"]
    return rows, {**figures, "time_ratio": time_ratio(preset.timed)}


def train(
    split: str, clients: int, codec: SparseEden | None, shared: bool, seed: int, preset: Preset
) -> tuple[float, float]:
    """Return the accuracy after the last round, and the mean error of a round's mean update over its squared norm."""
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    order = rng.permutation(len(labels))
    test, rest = order[:360], order[360:]
    own = [rest[mine] for mine in partition(labels[rest].tolist(), clients, split, seed)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    params = list(model.parameters())
    now = torch.nn.utils.parameters_to_vector(params).detach().numpy().copy()
    errors = []
    for _ in range(preset.rounds):
        updates = [
            update(model, now, images[mine], labels[mine], np.random.default_rng(rng.integers(2**32)))
            for mine in own
            if len(mine)
        ]
        mean = np.mean(updates, axis=0)
        if codec is not None:
            words = rng.integers(2**32, size=len(updates))
            sent = [through(codec, x, int(words[0 if shared else k])) for k, x in enumerate(updates)]
            errors.append(float(((np.mean(sent, axis=0) - mean) ** 2).sum() / (mean**2).sum()))
            mean = np.mean(sent, axis=0)
        now = (now + mean).astype(np.float32)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(now), params)
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).double().mean()
    return float(right), statistics.fmean(errors) if errors else 0.0


def update(
    model: torch.nn.Module, now: Vector, images: torch.Tensor, labels: torch.Tensor, rng: np.random.Generator
) -> Vector:
    """Return what a few steps on a client's data change."""
    params = list(model.parameters())
    torch.nn.utils.vector_to_parameters(torch.from_numpy(now.copy()), params)
    optimizer = torch.optim.SGD(params, LR)
    for _ in range(STEPS):
        batch = torch.from_numpy(rng.integers(len(labels), size=BATCH))
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]))
        optimizer.step()
    found: Vector = torch.nn.utils.parameters_to_vector(params).detach().numpy() - now
    return found


def through(codec: SparseEden, x: Vector, word: int) -> Vector:
    """Return what is decoded of an update that is encoded with this word."""
    symbols, scales = codec.quantize(x, word)
    return codec.dequantize(symbols, scales, slice(0, x.size), word)


def time_ratio(size: int) -> float:
    """Return the CPU time to add an update that has to be rotated back, over that to add what was sent alone."""
    codec = SparseEden()
    x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    symbols, scales = codec.quantize(x, 1)
    places, values = nonzero(symbols)
    signs = np.sign(values).astype(np.float32)
    into = np.zeros(size, np.float32)

    def alone() -> None:
        into[places] += signs  # places differ from each other

    return least(lambda: codec.add(symbols, scales, slice(0, size), 1, np.float32(1), True, into)) / least(alone)


def least(work: Callable[[], object]) -> float:
    """Return the least CPU time of nine calls, in seconds."""
    found = []
    for _ in range(9):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


if __name__ == "__main__":
    run_in_folder("shared_rotation", __doc__ or "", PRESETS, measure)
