"""The mean of what all devices keep under SCAFFOLD or FedDyn, moved on by each round's frames.

    common' = (W common + sum of w_i q_i) / W'

q_i is what device i's update decodes to, of the vector that it keeps the sum of; W and W' are the weights of all
devices that had counted before and that have now. So `common` is the mean of the sums that the devices hold
themselves, over all that ever counted, of whom most may be in no round for long. Where all begin anew (one was shut
out) W is 0: the mean before that still goes out with the model until the next step, but no device corrects itself by
it, since none is in it any more.

Under SCAFFOLD it stands behind the model, in the version's file and on its way to the devices; under FedDyn in the
version's state, which never leaves the aggregator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.aggregation.algorithms import followed

if TYPE_CHECKING:
    from thinwire.aggregation import WeightedMean
    from thinwire.aggregation.algorithms import Algorithm
    from thinwire.core.layout import Layout
    from thinwire.core.types import State, Vector
    from thinwire.server.model.device_weights import Weights

COMMON = "common"  # in the run's state


def moved_on(algorithm: Algorithm, travels: Layout, held: Vector | None, tally: WeightedMean, by: Weights) -> Vector:
    """The new mean; of the tally nothing is changed."""
    start = followed(algorithm, travels)[0].start
    made: Vector = tally.total[start:] * np.float32(1.0 / by.everyone)
    if held is not None and by.before:
        made += held * np.float32(by.before / by.everyone)
    return made


def held(algorithm: Algorithm, travels: Layout, params: Vector, state: State) -> Vector | None:
    """The mean as it was at a version; None before any device counted."""
    return params[travels.model_size :] if algorithm.control else state.get(COMMON)
