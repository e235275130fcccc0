"""SCAFFOLD, option II (Karimireddy et al. 2020, "Stochastic controlled averaging for federated learning").

Each local step goes by  g - c_i + c,  so that a device whose data differ walks where all of them would:

    y <- y - lr (g(y) - c_i + c);    c_i+ = c_i - c + (x - y) / (lr a);    c <- c + mean of (c_i+ - c_i)

a is the sum of the weights with which the gradients of the local steps are in y (the number of steps, where there is no
momentum and no schedule), so c_i+ is the mean of the device's own gradients whatever the optimizer did with them. What
travels is c_i+ - c_i, in a codec; c_i moves by what it decodes to, so that c is the mean of what the devices really
hold. What the codec left out is still missing from c_i, and is part of the next difference.

A device whose c_i is not in c yet goes by g alone, and its c_i+ is the mean of its gradients like any other's. In the
paper it goes by g + c with c_i = 0, and c is divided by the number of all devices, so that those never asked are in it
as zeros. Here c is the mean of those that counted: g + c would be about two gradients, a step of twice the length.
Either way the corrections of all devices, by their weights, sum to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.core.types import Vector


@dataclass(frozen=True)
class Scaffold:
    """See `Algorithm`; own_i is c_i, `common` is c.

    Law: a change of -lr (g + shift) makes `wanted` g, whatever the shift was.

    >>> Scaffold(lr=0.5).wanted(np.float32([1]), np.float32([3]), np.float32([-2]))
    array([2.], dtype=float32)
    """

    lr: float
    control: bool = True
    prox: float = 0.0
    whole: bool = False

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        return np.zeros_like(own) if common is None else common - own

    def wanted(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        made: Vector = change * np.float32(-1.0 / self.lr)
        if common is not None:
            made += own
            made -= common
        return made

    def step(self, change: Vector, common: Vector) -> Vector:
        del common
        return change
