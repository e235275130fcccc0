"""What devices have sent so far, under ef21: one sum for all of them, which each round moves on.

Each device's reference g_i is the sum of what was decoded of its updates, so S = sum w_i g_i is the sum of all updates
with the device's weight, and (1 / sum w_i) S what the paper's server averages from its g_i, client by client. A device
that is not in a round counts with its last g_i, as in EF21-PP (Fatkhullin et al. 2021). Law: w_i is what it was in the
first round that counted the device, and no update is discounted, else S would not be the sum of w_i g_i any more.

One device's part cannot be taken out of S: its g_i stands nowhere but on its own disk. So when a device that is in
S was shut out, the next round begins anew for all: S and every g_i are 0 again, and what was asked for before does not
count. That costs the other devices what a first round costs, and keeps none of the one that was shut out.
"""

from __future__ import annotations

import numpy as np

from thinwire.aggregation import WeightedMean
from thinwire.core.types import State, Vector
from thinwire.server.model.device_weights import Weights

SHARES = "shares"  # in the run's state


def moved_by(tally: WeightedMean, state: State, weights: Weights) -> tuple[Vector, State]:
    """(the change of all devices that ever sent, the new sum); the tally's own memory is given away."""
    total = tally.total
    if SHARES in state and weights.before:  # nobody known: all begin anew
        total += state[SHARES]
    return total * np.float32(tally.normaliser / tally.examples / weights.everyone), {SHARES: total}
