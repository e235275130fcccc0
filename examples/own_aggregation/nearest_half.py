"""A reduction of one's own: the mean of the half of the updates that lie nearest to each other's middle."""

from dataclasses import dataclass

import numpy as np

from thinwire.aggregation import Combination


@dataclass
class NearestHalf(Combination):
    """The mean of the `share` of the updates with the least sum of distances to all updates.

    While fewer than half of the clients and at most 1 - share are hostile, no update that is far away is chosen.
    """

    share: float = 0.5
    fewest = 4  # a round of fewer updates makes no step
    chooses = True  # the journal holds which updates were chosen

    def weights(self, distances):
        count = len(distances)
        kept = np.argsort(np.sqrt(distances).sum(axis=1), kind="stable")[: int(np.ceil(self.share * count))]
        weights = np.zeros(count)
        weights[kept] = 1 / len(kept)
        return weights
