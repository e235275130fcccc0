"""By how much a device's change is divided, so that devices that did different work can be averaged (FedNova).

The change of t plain SGD steps is a weighted sum of t gradients; `a` is the sum of the weights (Wang et al. 2020). One
recurrence over the steps really done covers momentum m, FedProx's mu, and a learning rate that moves:

    v = m v + 1 - mu lr A;    A += (lr_k / lr) v

With m = mu = 0 it is t; with momentum alone (t - m (1 - m^t) / (1 - m)) / (1 - m). Adam's steps do not scale with the
gradient: there a = t, which is a convention and not a law.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Normaliser:
    """`lr` is the plan's; each step is counted as it is made.

    >>> counted = Normaliser(momentum=0.9); counted.step(); counted.step(); counted.a
    2.9
    """

    momentum: float = 0.0
    mu: float = 0.0
    lr: float = 1.0
    a: float = 0.0
    velocity: float = 0.0

    def step(self, lr_now: float | None = None) -> None:
        self.velocity = self.momentum * self.velocity + 1.0 - self.mu * self.lr * self.a
        self.a += (lr_now / self.lr if lr_now is not None else 1.0) * self.velocity
