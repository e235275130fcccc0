"""Data that installed packages ship, in the shapes of the quickstarts' own data sets: loading is no part of a port."""

from __future__ import annotations

import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits, load_iris
from torch import nn

from thinwire.client import ClientInfo, Split, held_out, own_part

PACKAGES, WORDS, TOKENS, PIECES = ("asyncio", "email", "tkinter", "unittest"), 48, 2048, 200


def images(client: ClientInfo, side: int, channels: int) -> tuple[torch.Tensor, torch.Tensor, Split]:
    """Return scikit-learn's digits as images of that size, their labels, and this client's indices of both."""
    found = load_digits()
    grey = torch.tensor(found.images[:, None] / 16, dtype=torch.float32)
    large = nn.functional.interpolate(grey, (side, side)).repeat(1, channels, 1, 1)
    return large, torch.tensor(found.target), Split(*held_out(own_part(found.target, client), 0.2, client))


def pieces(client: ClientInfo) -> Split:
    """Return this client's pieces of Python's library: dicts of the words' numbers, and their package as the label."""
    rows: list[dict[str, torch.Tensor]] = []
    for label, package in enumerate(PACKAGES):
        folder = Path(sysconfig.get_path("stdlib")) / package
        text = "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))
        words = [1 + zlib.crc32(word.encode()) % (TOKENS - 1) for word in re.findall(r"[A-Za-z_]+", text)]
        for at in range(0, len(words) - WORDS, WORDS)[:PIECES]:
            rows.append({"input_ids": torch.tensor(words[at : at + WORDS]), "labels": torch.tensor(label)})
    train, test = held_out(own_part(np.array([int(row["labels"]) for row in rows]), client), 0.2, client)
    return Split([rows[at] for at in train], [rows[at] for at in test])


def iris(client: ClientInfo) -> Split:
    """Return this client's rows of the iris table: four lengths in centimetres, and one of three species."""
    rows, species = load_iris(return_X_y=True)
    train, test = held_out(own_part(species, client), 0.2, client)
    return Split((rows[train], species[train]), (rows[test], species[test]))
