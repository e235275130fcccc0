"""A character-level language model of Python source: 1.0 M parameters, on the standard library of this machine.

The data are its largest top-level modules and packages; `by(package)` gives each client one of them, so clients
differ as people who write code do. Symbols are printable ASCII and the end of a line; the context is 64 of them.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, own_part

PACKAGES = 64  # the largest ones: as many clients can have one each
LONGEST = 1 << 13  # characters of one package: as little as one device may hold
LEFT_OUT = {"test", "tests", "idle_test", "site-packages"}
MEASURED = 64  # windows of a client that are kept for measuring, at the most
CONTEXT = 64
NEWLINE = 95
SYMBOLS = 96
WIDTH = 200
BACK = (1, 2, 4, 8, 16, 32)  # symbols: the layers together look back over CONTEXT of them


class GatedConvolution(nn.Module):
    """(N, T, WIDTH) to the same shape: adds to each symbol's vector what a gate lets through of it and of one before.

    A causal convolution of two taps, `back` symbols apart (van den Oord et al. 2016), with a gated linear unit
    (Dauphin et al. 2017), as one matrix product. Before the first symbol there are zeros.
    """

    def __init__(self, back: int) -> None:
        super().__init__()
        self.back = back
        self.norm = nn.LayerNorm(WIDTH)
        self.taps = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        here = self.norm(vectors)
        before = nn.functional.pad(here, (0, 0, self.back, 0))[:, : here.shape[1]]
        return vectors + nn.functional.glu(self.taps(torch.cat([here, before], 2)), 2)


class LanguageModel(nn.Sequential):
    """Symbols (N, T) to the logits (N, T, SYMBOLS) of the symbol that follows each.

    It learns by plain SGD, which a transformer of this size does not in so few steps. It takes all symbols of a window
    at once, so that a step of 4 windows costs a quarter of what it does with a GRU of this size.
    """

    def __init__(self) -> None:
        layers = [GatedConvolution(back) for back in BACK]
        super().__init__(nn.Embedding(SYMBOLS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))


def model() -> nn.Module:
    return LanguageModel()


def data(client: ClientInfo) -> Split:
    """This client's packages in windows; up to a fifth of these is kept for measuring."""
    windows, names = library()
    mine = own_part({"package": names}, client)
    train, test = held_out(mine, min(0.2, MEASURED / len(mine)), client)
    return Split(TensorDataset(windows[torch.from_numpy(train)]), TensorDataset(windows[torch.from_numpy(test)]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    symbols = batch[0].long()
    logits = model(symbols[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Loss in nats a symbol, and how many of the next symbols are right."""
    symbols = batch[0].long()
    logits, follow = model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten()
    lost = nn.functional.cross_entropy(logits, follow, reduction="sum")
    return {
        "loss": (float(lost), float(len(follow))),
        "accuracy": (float((logits.argmax(1) == follow).sum()), float(len(follow))),
    }


@cache
def library() -> tuple[torch.Tensor, NDArray[np.str_]]:
    """Windows of CONTEXT + 1 symbols, each beginning with the last one of that before; and of whose package each is."""
    found, names = [], []
    for name, text in packages().items():
        symbols = encoded(text)
        starts = np.arange((len(symbols) - 1) // CONTEXT)[:, None] * CONTEXT
        found.append(symbols[starts + np.arange(CONTEXT + 1)])
        names += [name] * len(starts)
    return torch.from_numpy(np.concatenate(found)), np.array(names)


def packages() -> dict[str, str]:
    """The text of the largest ones, by name."""
    texts = {name: source(name) for name in sys.stdlib_module_names}
    largest = sorted(texts, key=lambda name: (-len(texts[name]), name))[:PACKAGES]
    return {name: texts[name][:LONGEST] for name in sorted(largest)}


def source(name: str) -> str:
    """All code of one module or package without its tests; nothing where it is not written in Python."""
    there = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted((there / name).rglob("*.py")) if not LEFT_OUT & set(path.parts)]
    return "\n".join(path.read_text("utf-8", "replace") for path in [there / f"{name}.py", *files] if path.is_file())


def encoded(text: str) -> NDArray[np.uint8]:
    """Characters as 0 to 95: a tab is four blanks, what is not ASCII a question mark.

    >>> encoded("a b\\n").tolist()
    [65, 0, 66, 95]
    """
    symbols = np.frombuffer(text.replace("\t", "    ").encode("ascii", "replace"), np.uint8)
    symbols = symbols[(symbols == ord("\n")) | ((symbols >= ord(" ")) & (symbols <= ord("~")))]
    return np.where(symbols == ord("\n"), NEWLINE, symbols - ord(" ")).astype(np.uint8)
