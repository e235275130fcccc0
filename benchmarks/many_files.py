"""Local training of 200 clients at once, on a file of Python's standard library each: a small `examples/code_lm`.

A client's text is a file of at least 4 000 symbols without tests, as `examples/code_lm` writes symbols. A seed draws
the files, and 28 windows of each: 24 to learn from, and 4 that are kept for measuring. No two windows overlap. A window
has 16 symbols to be found, each from the 4 before it, by a network of one hidden layer on embeddings (Bengio et al.
2003) with 4 992 parameters. The model of `examples/code_lm` has a million, and the noise of 200 clients leaves nothing
of an update so long.

Each client makes full-batch steps of SGD from the same model, all clients in one product of stacked matrices. Per
client that is what `TorchTrainer` does with a batch of all examples (tests).
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.many_clients import CLIENTS, EXAMPLES
from examples.code_lm.task import LEFT_OUT, SYMBOLS, encoded
from thinwire.core.types import Vector

CONTEXT, FOUND, MEASURED, SHORTEST = 4, 16, 4, 4000
WINDOW = CONTEXT + FOUND
WIDTH, HIDDEN = 8, 32
SHAPES = ((SYMBOLS, WIDTH), (HIDDEN, CONTEXT * WIDTH), (1, HIDDEN), (SYMBOLS, HIDDEN), (1, SYMBOLS))
SIZE = sum(rows * columns for rows, columns in SHAPES)
TABLES = {"encodings", "pydoc_data", "lib2to3"}  # folders of tables, and of code that was written by programs


@dataclass(frozen=True)
class Code:
    """Holds the clients' windows (clients, examples, WINDOW) of symbols, and those for measuring (windows, WINDOW)."""

    windows: torch.Tensor
    measured: torch.Tensor

    def of(self, clients: Sequence[int]) -> Code:
        """Return the windows of these clients alone."""
        return replace(self, windows=self.windows[list(clients)])


def code_of(seed: int, clients: int = CLIENTS, examples: int = EXAMPLES) -> Code:
    """Return the windows of all clients; ValueError if there are not as many files."""
    files, rng = long_files(), np.random.default_rng(seed)
    if clients > len(files):
        raise ValueError(f"{clients} clients with a file each, of {len(files)}")
    learned, measured = [], []
    for number in rng.permutation(len(files))[:clients]:
        symbols = files[number]
        starts = rng.permutation(len(symbols) // WINDOW)[: examples + MEASURED] * WINDOW
        windows = symbols[starts[:, None] + np.arange(WINDOW)]
        learned.append(windows[:examples])
        measured.append(windows[examples:])
    return Code(torch.from_numpy(np.stack(learned)).long(), torch.from_numpy(np.concatenate(measured)).long())


@cache
def long_files() -> list[NDArray[np.uint8]]:
    """Return the symbols of each file of the standard library that is long enough, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not (LEFT_OUT | TABLES) & set(path.relative_to(root).parts)]
    texts = (encoded(path.read_text("utf-8", "replace")) for path in files)
    return [symbols for symbols in texts if len(symbols) >= SHORTEST]


def first_model(seed: int) -> Vector:
    """Return the first parameters of the network, flat, as torch draws them for its layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.Linear(HIDDEN, SYMBOLS)
    return np.asarray(
        nn.utils.parameters_to_vector(nn.ModuleList(layers).parameters()).detach().numpy(), dtype=np.float32
    )


def updates_of(params: Vector, data: Code, steps: int, rate: float) -> NDArray[np.float32]:
    """Return what each client learns in so many steps from this model, (clients, parameters)."""
    clients = len(data.windows)
    stacked = torch.from_numpy(params).expand(clients, SIZE)
    tensors = [tensor.clone().requires_grad_() for tensor in _tensors(stacked)]
    for _ in range(steps if clients else 0):
        logits = _logits(tensors, data.windows)
        follow = data.windows[:, :, CONTEXT:]
        lost = nn.functional.cross_entropy(logits.flatten(0, 1), follow.flatten(), reduction="sum")
        gradients = torch.autograd.grad(lost / follow[0].numel(), tensors)
        tensors = [
            (tensor - rate * gradient).detach().requires_grad_()
            for tensor, gradient in zip(tensors, gradients, strict=True)
        ]
    ends = torch.cat([tensor.detach().flatten(1) for tensor in tensors], 1)
    return np.asarray(ends.numpy() - params, dtype=np.float32)


def accuracy(params: Vector, data: Code) -> float:
    """Return the share of the measured symbols that the model finds."""
    found = _logits(_tensors(torch.from_numpy(params)[None]), data.measured[None]).argmax(2)
    return float((found.flatten() == data.measured[:, CONTEXT:].flatten()).float().mean())


def _logits(tensors: Sequence[torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
    """Return (clients, examples * FOUND, SYMBOLS) of windows (clients, examples, WINDOW)."""
    vectors, first, first_bias, second, second_bias = tensors
    clients = len(windows)
    before = windows.unfold(2, CONTEXT, 1)[:, :, :-1].reshape(clients, -1)
    places = before + SYMBOLS * torch.arange(clients)[:, None]
    known = vectors.flatten(0, 1)[places].reshape(clients, -1, CONTEXT * WIDTH)
    hidden = torch.baddbmm(first_bias, known, first.transpose(1, 2)).tanh()
    return torch.baddbmm(second_bias, hidden, second.transpose(1, 2))


def _tensors(stacked: torch.Tensor) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(rows * columns for rows, columns in SHAPES))
    parts = torch.tensor_split(stacked, ends[:-1], 1)
    return [part.reshape(len(stacked), *shape) for part, shape in zip(parts, SHAPES, strict=True)]
