"""FedDyn (Acar et al. 2021, "Federated learning based on dynamic regularization", algorithm 1).

Each device's loss gets a term by which all of them agree where the mean loss is least:

    y_i = argmin L_i(y) - <l_i, y> + alpha/2 |y - x|^2;    l_i <- l_i - alpha (y_i - x)
    h <- h - alpha mean of (y_i - x);                      x <- mean of y_i - h / alpha

l_i is -alpha times the sum of what device i sent, and h is -alpha times the mean of these sums over all devices: so
neither travels, and both move by the decoded frames of the model's own changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.core.types import Vector


@dataclass(frozen=True)
class FedDyn:
    """See `Algorithm`; own_i is -l_i / alpha, `common` is -h / alpha.

    >>> FedDyn(alpha=0.5).step(np.float32([1]), np.float32([3]))
    array([4.], dtype=float32)
    """

    alpha: float
    control: bool = False
    whole: bool = True

    @property
    def prox(self) -> float:
        return self.alpha

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        del common
        return own * np.float32(self.alpha)

    def wanted(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        del own, common, change
        return None

    def step(self, change: Vector, common: Vector) -> Vector:
        change += common
        return change
