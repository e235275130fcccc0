"""Plain SGD with torch's own arithmetic and none of its bookkeeping, which costs more than a small model's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Descent:
    """`step` leaves the same bits as `torch.optim.SGD(params, lr, momentum, weight_decay=weight_decay)` (a test).

    g = grad + weight_decay p;    v = momentum v + g (v = g at first);    p -= lr v
    """

    def __init__(
        self, params: Sequence[torch.Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.params, self.momentum, self.weight_decay = params, momentum, weight_decay
        self.param_groups = [{"lr": lr}]  # as torch's: a schedule writes here
        self._velocity: dict[int, torch.Tensor] = {}  # by the parameter's place: one without a gradient has none

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        lr = self.param_groups[0]["lr"]
        for place, parameter in enumerate(self.params):
            change = parameter.grad
            if change is None:
                continue
            if self.weight_decay:
                change = change.add(parameter, alpha=self.weight_decay)
            if self.momentum:
                velocity = self._velocity.get(place)
                if velocity is None:
                    velocity = self._velocity[place] = change.clone()
                else:
                    velocity.mul_(self.momentum).add_(change)
                change = velocity
            parameter.add_(change, alpha=-lr)
