"""A vector that is added to the gradient of every local step: what SCAFFOLD and FedDyn correct a device's drift by.

It is added after a clip, which is of the device's own gradient: so that the sum of the own gradients can be read from
how far the device went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]


class Drift:
    """`shift` holds the parameters' values one after the other, in their order."""

    def __init__(self, params: Sequence[torch.Tensor], shift: Vector) -> None:
        self.params, at = params, 0
        self.shifts: list[torch.Tensor] = []
        for p in params:
            piece = torch.from_numpy(shift[at : at + p.numel()])
            self.shifts.append(piece.view(p.shape).to(p.device, p.dtype))
            at += p.numel()

    @torch.no_grad()
    def correct(self) -> None:
        """A parameter that the loss did not reach has a gradient of zero: it is moved as well."""
        for parameter, shift in zip(self.params, self.shifts):
            if parameter.grad is None:
                parameter.grad = shift.clone()
            else:
                parameter.grad.add_(shift)
