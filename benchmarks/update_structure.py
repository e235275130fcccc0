"""Measure what a codec below one bit could still gain from the structure of updates, and how far it is from the bound.

    python -m benchmarks.update_structure [--preset small|full] --json

`eden(b)` treats an update as noise: its rotation spreads all energy evenly. Three things could do better, and each is
measured on the updates of fp32 runs of `benchmarks.accuracy_bytes` (4 of 20 clients a round, unequal data), without any
codec of it being built. A gain is by how much the variance of the error would fall at equal bits; near 0.1 bits a value
that is also by how much the bits would fall at an equal error.

- Prediction. The client subtracts the last server step, times the best factor for this very update, and sends the
  prediction error. `predicted_gain` is the energy of the update over that of the error, and `cosine` the mean cosine
  between update and step.
- Rates by energy. At low rates the variance of an unbiased codec is about e / b for a value of energy e with b bits. It
  is least where bits follow sqrt(e) (as Neyman allocates samples to strata): the gain is mean(e) / mean(sqrt(e))^2 over
  the energies e of all values. `layer_gain` has the energies of each tensor, and `factored_gain` those that the mean
  energies of a tensor's rows, columns and kernel positions give when they are multiplied, as Adafactor does. Both
  know the energies of this very round, which a real codec would have to send or to guess.
- `guessed_gain`: the same factored energies, guessed by the aggregator from the updates of earlier rounds as it would
  have received them, with the noise of `eden(0.1)`. Below 1 it is a loss. Both ends would know this guess only if the
  aggregator sent it along.

A row is one model and one quarter of its rounds. A row with `what = "bound"` has one rate b of eden: its omega, and
`bound_ratio`, b over the bits that any unbiased codec with this omega needs for normal values, log2(1 + 1 / omega) / 2
(the rate-distortion function): no trellis and no lattice gains more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.trials import CLIENTS, FP32, Trial
from benchmarks.document import note
from benchmarks.entry import Measured, run_in_folder
from thinwire.aggregation import Reduction
from thinwire.aggregation.reduction_base import UpdateRows
from thinwire.client.task import initial_model, load_task
from thinwire.compression.codecs.drive_eden import SparseEden
from thinwire.core.types import Vector
from thinwire.simulation import simulate

Wide = NDArray[np.float64]
RATES = {"digits": 0.8, "cnn": 0.1, "code_lm": 2.0}  # of the fp32 cells; the cnn has 0.05 there
B = ("0.05", "0.1", "0.3", "0.6", "1.25")
GUESS_B = "0.1"
DECAY = 0.9  # of the guess, from one round to the next
LEAST = 0.05  # of the mean energy: a guess is no smaller, or noise would make it 0
QUARTERS = 4
SEED = 1


@dataclass(frozen=True)
class Preset:
    """Sets how many rounds each model has."""

    rounds: Mapping[str, int]


PRESETS = {
    "tiny": Preset({"digits": 8}),
    "small": Preset({"digits": 80, "cnn": 80}),
    "full": Preset({"digits": 80, "cnn": 200, "code_lm": 60}),
}


@dataclass
class MeasuringMean(Reduction):
    """The mean of the updates, which notes what there is to gain in each round."""

    shapes: Sequence[tuple[int, ...]]
    omega: float
    seen: list[dict[str, float]] = field(default_factory=list)
    change: Vector | None = None
    guess: Wide | None = None
    fewest = 1

    def reduce(self, updates: UpdateRows) -> Vector:
        """Return the mean."""
        rows = np.concatenate([block.astype(np.float64) for _, block in updates.blocks()], axis=1)
        energy = (rows**2).mean(0)
        found = {"layer_gain": self._gain(energy, plain_mean), "factored_gain": self._gain(energy, factored)}
        if self.change is not None and self.guess is not None:
            lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(self.change)
            cosines = rows @ self.change / np.maximum(lengths, 1e-30)
            found |= {"cosine": float(cosines.mean()), "predicted_gain": float(1 / (1 - cosines**2).mean())}
            found["guessed_gain"] = gain_of(rows, np.concatenate([*self._each(self.guess, factored)]))
        self.seen.append(found)
        self.change = cast("Vector", rows.mean(0).astype(np.float32))
        estimate = self._estimated(rows)
        self.guess = estimate if self.guess is None else DECAY * self.guess + (1 - DECAY) * estimate
        return self.change

    def _gain(self, energy: Wide, mean: Any) -> float:
        parts = np.concatenate([*self._each(energy, mean)])
        return float(parts.mean() / np.sqrt(parts).mean() ** 2)

    def _each(self, values: Wide, mean: Any) -> Iterator[Wide]:
        at = 0
        for shape in self.shapes:
            size = math.prod(shape)
            yield mean(values[at : at + size].reshape(shape))
            at += size

    def _estimated(self, rows: Wide) -> Wide:
        """Return what the aggregator would estimate of each value's energy: squares, less the noise that it knows."""
        noise = self.omega * (rows**2).mean(1, keepdims=True)
        draws = np.random.default_rng(len(self.seen)).standard_normal(rows.shape)
        estimate: Wide = ((rows + np.sqrt(noise) * draws) ** 2 - noise).mean(0)
        return estimate


def plain_mean(values: Wide) -> Wide:
    """Return the mean of a tensor for each of its values.

    >>> plain_mean(np.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    return np.full(values.size, values.mean())


def factored(values: Wide) -> Wide:
    """Return the product of the means over all axes but one, each divided by the mean, times the mean.

    Axes from the third on are one: the positions of a kernel. A vector has its mean.

    >>> factored(np.array([[1.0, 2.0], [3.0, 6.0]])).tolist()
    [1.0, 2.0, 3.0, 6.0]
    """
    whole = max(float(values.mean()), 1e-30)
    if values.ndim < 2:
        return np.full(values.size, whole)
    parts = values.reshape(*values.shape[:2], -1)
    first, second, third = (np.maximum(parts.mean(axes), 0.0) / whole for axes in ((1, 2), (0, 2), (0, 1)))
    made: Wide = whole * first[:, None, None] * second[None, :, None] * third[None, None, :]
    return made.reshape(-1)


def gain_of(rows: Wide, energy: Wide) -> float:
    """Return the gain for these updates if the bits follow the roots of `energy`."""
    energy = np.maximum(energy, LEAST * max(float(energy.mean()), 1e-30))
    weight = energy**-0.5
    return float(np.mean((rows**2).mean(1) / ((1 / weight).mean() * (rows**2 * weight).mean(1))))


def bounds() -> Iterator[dict[str, Any]]:
    """Yield how far each rate of eden is from what any unbiased codec could reach."""
    for b in B:
        omega = SparseEden(rate=Decimal(b)).omega
        least = math.log2(1 + 1 / omega) / 2
        yield {"what": "bound", "b": float(b), "omega": omega, "bound_ratio": float(b) / least}


def structure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Train one model with fp32, and return a row a quarter of the rounds."""
    work = FULL[name].work
    layout = initial_model(load_task(work.task), SEED).layout
    measuring = MeasuringMean([tensor.shape for tensor in layout.trained], SparseEden(rate=Decimal(GUESS_B)).omega)
    keys = Trial(work, FP32, RATES[name], rounds).keys(SEED)
    keys["run"]["evaluate_every"] = rounds
    keys["cohort"]["late"] = "drop"
    simulate(work.task, keys, clients=CLIENTS, split=work.split, reduce=measuring, progress=False)
    seen, rows = measuring.seen, list[dict[str, Any]]()
    for quarter in range(QUARTERS):
        part = seen[quarter * len(seen) // QUARTERS : (quarter + 1) * len(seen) // QUARTERS]
        names = dict.fromkeys(name for row in part for name in row)
        means = {each: fmean(row[each] for row in part if each in row) for each in names}
        rows.append({"what": "updates", "model": name, "quarter": quarter + 1, "rounds": len(part), **means})
        note(str(rows[-1]))
    return rows


def measure(preset: Preset, folder: Path) -> Measured:
    """Return all rows; a figure is the largest of its quarters."""
    del folder
    rows = [row for name, rounds in preset.rounds.items() for row in structure(name, rounds)]
    gains = ("predicted_gain", "layer_gain", "factored_gain", "guessed_gain")
    figures = {
        f"{gain} {name}": max(row[gain] for row in rows if row["model"] == name)
        for name in preset.rounds
        for gain in gains
    }
    limits = [*bounds()]
    return [*rows, *limits], figures | {"bound_ratio": max(row["bound_ratio"] for row in limits)}


if __name__ == "__main__":
    run_in_folder("update_structure", __doc__ or "", PRESETS, measure)
