"""The two texts of this example, from the standard library: code for the base model, English prose for LoRA."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch

CONTEXT, SYMBOLS = 64, 96  # printable ASCII and the end of a line
CODE, PROSE = ("asyncio", "email", "http", "json"), ("pydoc_data",)


@cache  # in a simulation many clients share a process
def windows(packages: tuple[str, ...]) -> torch.Tensor:
    """Return the source of these packages as symbols, in rows of CONTEXT."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for name in packages for path in sorted((folder / name).glob("*.py"))]
    text = "".join(path.read_text("utf-8", "replace") for path in files)
    letters = np.frombuffer(text.replace("\\n", "\n").encode("ascii", "replace"), np.uint8)
    symbols = np.where((letters >= ord(" ")) & (letters <= ord("~")), letters - ord(" "), SYMBOLS - 1)
    rows = len(symbols) // CONTEXT
    return torch.from_numpy(symbols[: rows * CONTEXT].reshape(rows, CONTEXT).astype(np.int64))
