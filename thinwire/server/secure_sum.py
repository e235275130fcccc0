"""The masked sum of a secure round, in the place of the `RoundAggregator` of other rounds.

Masked updates are added as they arrive: whole numbers modulo 2^w, whose sum does not depend on their order. After the
last phase the masks are removed once, and the sum becomes the weighted mean of the survivors' updates.

The clip of a round is public and the same for all clients. With `[secure] clip = "auto"` it follows the share of the
survivors whose update fitted the grid, by the rule of Andrew et al. 2021 ("Differentially Private Learning with
Adaptive Clipping", section 2), here without noise: C' = C exp(RATE (QUANTILE - share)). What does not fit stays in a
client's residual, so a clip that is too small delays an update and loses nothing.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from thinwire.aggregation.lattice import BadSum, Lattice
from thinwire.aggregation.mean import Frames
from thinwire.aggregation.plan_codecs import lattice_of, rotation_key
from thinwire.aggregation.private_lattice import PrivateLattice, fitted_share
from thinwire.compression.vector_ops import bucket_sums, in_order
from thinwire.core import privacy_numbers
from thinwire.core.errors import BadPayload
from thinwire.core.run_events import SumUnmasked
from thinwire.core.secure_numbers import LEAST_CLIENTS
from thinwire.core.types import Metrics, ReplyHeader, SecureWork, State, UpdateId, Vector
from thinwire.privacy.contexts import SecureTerms, terms_of
from thinwire.privacy.messages import BadMessage
from thinwire.privacy.secure_round import MaskedSum, UnmaskingKeys
from thinwire.privacy.summed_metrics import impossible, summed_metrics
from thinwire.server.aggregator import Model, RoundAggregator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thinwire.core.formatting import Capped
    from thinwire.core.layout import Layout
    from thinwire.core.plan import RunPlan
    from thinwire.server.aggregator import WeightCaps

PARTS = ("masked",)  # of a masked update: the packed update, then the scalars
QUANTILE, RATE = 0.9, math.log(2) / 0.9  # no update fits: the clip doubles; all fit: it shrinks by 7 percent
FIRST_CLIP = 1.0  # of a run with clip = "auto": ten rounds in which nothing fits make it a thousand times larger


def next_clip(clip: float, fits: int, survivors: int) -> float:
    """Return the clip of the next round, by how many of the survivors' updates fitted the grid of this one.

    >>> [round(next_clip(1.0, fits, 10), 3) for fits in (0, 9, 10)]
    [2.0, 1.0, 0.926]
    """
    return min(max(clip * math.exp(RATE * (QUANTILE - fits / survivors)), 2.0**-60), 2.0**60)


class SecureAggregator(RoundAggregator):
    """The sum of the masked updates of one round.

    `lattice` and `terms` are those that every client of the round computes too. `mean`, `metrics` and `summed` are
    known after `unmask`: the weighted mean of the survivors' updates, the sums of their metrics, and the event of the
    journal. A metric that at most two clients have is not among them.

    Invariant: no update is taken out of the sum. To leave one out, the driver adds the others again.
    """

    def __init__(self, plan: RunPlan, layout: Layout, work: SecureWork, identity: str) -> None:
        self.plan, self.layout, self.work = plan, layout, work
        self.algorithm, self.weights = None, None
        self.lattice: Lattice = lattice_of(plan, layout.model_size, work, identity)
        self.terms: SecureTerms = terms_of(plan, work, self.lattice.lanes, self.lattice.width, self.lattice.grid)
        self.total = MaskedSum(self.terms)
        self.added: list[UpdateId] = []  # in the order in which their vectors were added
        self.mean: Vector | None = None
        self.metrics: Metrics = {}
        self.summed: SumUnmasked | None = None

    def add(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        """Add the two masked vectors of an update; raise `BadPayload` if they do not fit the terms of the round."""
        del discount
        if (names := tuple(part.name for part in header.parts)) != PARTS:
            raise BadPayload(f"a masked update with the parts {', '.join(names)[:80]}", why="expected masked")
        (body,) = frames()
        split = max(0, len(body) - self.total.scalars.nbytes)
        try:
            self.total.add(body[:split], bytes(body[split:]))
        except BadMessage as error:
            raise BadPayload(error.what, error.why) from None
        self.added.append(header.update_id)

    def unmask(self, keys: UnmaskingKeys, rotation_seed: bytes, number: int, at: float, elapsed_s: float) -> None:
        """Remove the masks, and decode the mean; raise `Aborted` or `BadSum` if the sum is not one of such updates."""
        start, survivors, clip = time.perf_counter(), self.total.clients, self.work.clip
        lanes, scalars = self.total.unmask(keys)
        weight = scalars["weight"]
        self._require_possible(scalars, survivors)
        self.mean = self.lattice.decode_sum(lanes, survivors, weight, self.work.window, rotation_key(rotation_seed))
        metrics = summed_metrics(self.plan.secure, scalars)  # a count of one or two is of so few clients at most
        self.metrics = {name: pair for name, pair in metrics.items() if pair[1] >= LEAST_CLIENTS}
        follows = self._next_clip(scalars["fits"], survivors) if "fits" in scalars else clip
        norm = math.sqrt(in_order(bucket_sums(self.mean, 2)))
        self.summed = SumUnmasked(
            at,
            number,
            survivors,
            weight,
            norm,
            clip,
            follows,
            elapsed_s,
            time.perf_counter() - start,
        )

    def _next_clip(self, fits: int, survivors: int) -> float:
        if isinstance(self.lattice, PrivateLattice):
            share = fitted_share(fits, self.lattice.noise.count, self.work.selected)
            return privacy_numbers.next_clip(self.work.clip, share)
        return next_clip(self.work.clip, fits, survivors)

    def _require_possible(self, scalars: Mapping[str, int], survivors: int) -> None:
        """Raise `BadSum` for scalars that no clients of the round have: one that lies must not end the run."""
        if self.plan.privacy.mode == "off" and not 0 <= scalars.get("fits", 0) <= survivors:
            raise BadSum(f"{scalars['fits']} of {survivors} updates fitted the grid")
        if found := impossible(self.plan.secure, scalars, survivors):
            raise BadSum(found)

    def fits(self) -> bool:
        """Return True: the clip bounds the mean, which false weights make at most `weight_max` times longer."""
        return True

    def capped(self, caps: WeightCaps, headers: Iterable[ReplyHeader]) -> dict[str, Capped]:
        """Return {}: the grid bounds each client, and nothing is known of a single one."""
        return {}

    def _change(self, model: Model) -> tuple[Vector | None, State]:
        return self.mean, {}
