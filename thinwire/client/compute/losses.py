"""The losses of the batches that were trained on, as one sum."""

from __future__ import annotations

import torch

KEPT = 256  # losses that wait to be added


class Losses:
    """Adds each loss times its batch's examples in float32, in their order, and many at a time.

    An addition between two steps of a small model costs several times one that follows another.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._sum, self._examples = torch.zeros((), device=device), 0
        self._waiting: list[tuple[torch.Tensor, int]] = []

    def add(self, loss: torch.Tensor, examples: int) -> None:
        self._waiting.append((loss.detach(), examples))
        if len(self._waiting) >= KEPT:
            self._add_up()

    def total(self) -> tuple[float, int]:
        """(sum of losses times examples, examples)."""
        self._add_up()
        return float(self._sum), self._examples

    def _add_up(self) -> None:
        for loss, examples in self._waiting:
            self._sum += loss * examples
            self._examples += examples
        self._waiting.clear()
