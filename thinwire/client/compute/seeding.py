"""Task code draws from global generators; here they are seeded by a key, and given back as they were found."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from .keys import Key, seed63


def seed_all(key: Key) -> None:
    """Let whatever is drawn next from torch, numpy or `random` depend on the key alone."""
    seed = seed63(key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.manual_seed_all(seed)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 -- task code uses the global generator
    random.seed(seed)


@contextlib.contextmanager
def seeded(key: Key) -> Iterator[None]:
    """Seed the generators of this process; afterwards they go on as if nothing had been drawn."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 -- as above
        stack.callback(random.setstate, random.getstate())
        seed_all(key)
        yield
