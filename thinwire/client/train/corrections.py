"""Corrections of local training's gradients (FedProx, SCAFFOLD, FedDyn), and plain SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Proximal:
    """The proximal term of FedProx: mu/2 times the squared distance to the model with which the round began.

    Its gradient, mu (w - w_0), is added after `backward`. Li et al. 2020, "Federated Optimization in Heterogeneous
    Networks".
    """

    def __init__(self, params: Sequence[torch.Tensor], mu: float) -> None:
        self.params, self.mu = params, mu
        self.begun = [parameter.detach().clone() for parameter in params]

    @torch.no_grad()
    def pull(self) -> None:
        """Add the term's gradient to each parameter that has a gradient; the others are not moved."""
        for parameter, begun in zip(self.params, self.begun):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - begun, alpha=self.mu)


if TYPE_CHECKING:
    Vector = NDArray[np.float32]


class GradientCorrection:
    """The drift correction of SCAFFOLD and FedDyn: a vector that is added to the gradient of every local step.

    `shift` holds the parameters' values one after the other, in their order. It is added after gradient clipping, which
    applies to the device's own gradient. So the sum of the device's own gradients can be computed from its update.
    """

    def __init__(self, params: Sequence[torch.Tensor], shift: Vector) -> None:
        self.params, at = params, 0
        self.shifts: list[torch.Tensor] = []
        for p in params:
            piece = torch.from_numpy(shift[at : at + p.numel()])
            self.shifts.append(piece.view(p.shape).to(p.device, p.dtype))
            at += p.numel()

    @torch.no_grad()
    def correct(self) -> None:
        """Add the vector to the gradients.

        A parameter that the loss did not reach has a gradient of zero: it is moved as well.
        """
        for parameter, shift in zip(self.params, self.shifts):
            if parameter.grad is None:
                parameter.grad = shift.clone()
            else:
                parameter.grad.add_(shift)


class Descent:
    """Plain SGD with torch's arithmetic but without its bookkeeping, which costs more than a small model's step.

        g = grad + weight_decay p;    v = momentum v + g (v = g at first);    p -= lr v

    Invariant, tested: `step` leaves the same bits as `torch.optim.SGD(params, lr, momentum,
    weight_decay=weight_decay)`.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.params, self.momentum, self.weight_decay = params, momentum, weight_decay
        self.param_groups = [{"lr": lr}]  # like torch's: a schedule sets "lr" here
        self._velocity: dict[int, torch.Tensor] = {}  # parameter's index -> velocity, if it has a gradient

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
