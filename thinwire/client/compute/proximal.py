"""FedProx (Li et al. 2020): the loss gets mu/2 times the squared distance to the model that the round began with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Proximal:
    """Adds the term's gradient, mu (w - w_0), after `backward`; a parameter without a gradient is not moved."""

    def __init__(self, params: Sequence[torch.Tensor], mu: float) -> None:
        self.params, self.mu = params, mu
        self.begun = [parameter.detach().clone() for parameter in params]

    @torch.no_grad()
    def pull(self) -> None:
        for parameter, begun in zip(self.params, self.begun):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - begun, alpha=self.mu)
