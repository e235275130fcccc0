"""Rounds with differential privacy: who may spend another round, and when a noised model is released.

`SpendingRounds` reserves the cost of a round in the transaction that opens it, before an assignment leaves. A round
that makes no step, or that a crash ends, stays reserved: what was spent is never given back.

- `CentralMode`: the aggregator clips each update, and adds noise to the sum once (`PrivateAggregator`), or the noise of
  tree aggregation (`tree_noise.py`).
- `SampledMode`: central mode with `[privacy] sampling_rate`. Each device of the population is in a round by a secret
  coin of its own. Poisson sampling makes the epsilon of those smaller who see the released models and do not know who
  was sampled (`privacy/accounting.py`).
- `DistributedMode`: a secure round. Each client clips its update and adds its part of the noise before it masks it, so
  the aggregator sees a sum that has its noise.
- `DeviceMode`: each client adds the noise to its own update, or in its training, before it sends it (`NoisedMean`).

Invariant: one sum is noised once. A model with noise is durable under a hidden name before the commit that names it,
and gets its own name after that. After a crash before the commit the hidden file is deleted unread, and in central
mode the round is noised again; after a crash behind it the same bytes are released. A round that was open in a backup
is aborted when it is resumed, because the aggregator that was lost may have released its sum.

Invariant: a client counts once in a noised sum, by an update whose norm has the bound of the plan. Its reply has no
fact of its data beside the update, and neither weight nor normaliser.

Poisson sampling holds only if nothing but the coins decides, and nothing shows their result:

- The population is every enrolled and approved device when the first round opens. The first `RoundOpened` journals it,
  and it stays fixed: a device that enrolls later is in no round of the run, and one that is revoked is only absent.
- Coins are drawn once a round, in the transaction that opens it, for absent and busy devices too. Nothing replaces an
  absent device, and no round waits for devices.
- The sum is divided by the expected sample, rate times population, whatever the sample is.
- A round ends at its deadline, also when all have replied or nobody was sampled, so the time of a release tells
  nothing. An empty sample is released as noise. So nothing that others see depends on the size of a sample.
- Each client of the population pays for each round, at the rate, in one entry of the ledger without participants.

The journal has the sample, for a restart. What the journal shows others is `core.run_events.without_sample`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from thinwire.aggregation.mean import Frames
from thinwire.aggregation.plan_codecs import noised_dimensions
from thinwire.aggregation.private_lattice import Draw, NotRounded, PrivateSum, clip_layers
from thinwire.core.errors import BadPayload, DataLost, NonFiniteUpdate
from thinwire.core.formatting import Reason
from thinwire.core.privacy_numbers import next_clip
from thinwire.core.statedir import sync_path
from thinwire.privacy.noise_plan import NoisePlan, noise_plan
from thinwire.privacy.secret_rng import SystemRng
from thinwire.privacy.tree_aggregation import length_of
from thinwire.server.aggregator import Model, RoundAggregator, SumConfig
from thinwire.server.device_terms import assigned_codec
from thinwire.server.model_store import HIDDEN
from thinwire.server.policy.cohort import Cohort, poisson_sample
from thinwire.server.privacy_budget import PrivacyBudget
from thinwire.server.round import Round
from thinwire.server.round_mode import RoundMode
from thinwire.server.secure_mode import SecureMode
from thinwire.server.tree_noise import TreeNoise, erase_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from thinwire.compression import BoundCodec
    from thinwire.core.events import CloseReason, Event, ModelStored, RoundOpened
    from thinwire.core.formatting import Capped
    from thinwire.core.layout import Layout
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import ReplyHeader, State, Vector
    from thinwire.server.aggregator import WeightCaps
    from thinwire.server.context import RunContext
    from thinwire.server.round import RoundMachine
    from thinwire.server.round_events import RoundConfig


NOT_RESERVED = "the privacy ledger has no open reservation for it, as in a restored backup"


class SpendingRounds(RoundMode):
    """Rounds that spend privacy: a round's clients are selected when it opens, and count alike."""

    replaces = False  # a client that stands in for another would make the sum depend on who was quick
    evaluates_alone = False

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        self.budget = PrivacyBudget(plan)

    def noise(self, running: RunContext) -> NoisePlan:
        """Return the noise of each round: it follows from the plan and the size of the model."""
        clients = self.plan.cohort.clients  # distributed noise needs a number, central noise needs none
        selected = clients if isinstance(clients, int) else 1
        return noise_plan(self.plan, noised_dimensions(self.plan, running.layout.model_size), selected)

    def excluded(self, running: RunContext, device: str) -> str:
        why = super().excluded(running, device)
        return why or self.budget.excluded(running, device, self.noise(running).release)

    def blocked(self, running: RunContext) -> str:
        return self.budget.blocked(running)

    def require_budget(self, running: RunContext) -> None:
        self.budget.require_clients(running, self.noise(running).release)

    def abort(self, running: RunContext) -> None:
        super().abort(running)
        self.reveal(running, starts=True)

    def reveal(self, running: RunContext, starts: bool = False) -> None:
        """Give hidden versions their names; at a start, delete those that no event names, and what is half written."""
        folder, newest = running.versions.folder, running.versions.path(running.run_state.version).stem
        for path in sorted([*folder.glob(f"v*{HIDDEN}"), *folder.glob(f".v*{HIDDEN}*")]):
            if starts and (path.name.startswith(".") or path.name[: len(newest)] > newest):
                path.unlink()
            else:
                path.replace(path.with_suffix(""))
        sync_path(folder)

    def reserved(self, running: RunContext, opened: RoundOpened) -> list[Event]:
        able = [one for one in running.online.hellos.values() if self.plan.run.task in {t.name for t in one.tasks}]
        self.budget.require_delta(len(able))
        return self.budget.reserved(running, opened, self.noise(running).release)

    def withheld(self, running: RunContext, number: int) -> str:
        """Return why no noise may be added to the sum of a round: another aggregator may have released it already."""
        return "" if running.store.privacy.may_release(running.run_id, number) else NOT_RESERVED

    def released(self, running: RunContext, number: int, stored: Event, aggregator: RoundAggregator) -> list[Event]:
        follows = aggregator.next_clip if isinstance(aggregator, PrivateAggregator) else None
        return self.budget.released(running, number, cast("ModelStored", stored).digest, follows)

    def clip(self, running: RunContext) -> float:
        """Return the largest L2 norm of a client's update in the next round; an adaptive clip follows the last one."""
        assert self.plan.privacy.clip is not None, "the plan check demands it"
        return running.run_state.clip or self.plan.privacy.clip


class DistributedMode(SpendingRounds, SecureMode):
    """Rounds with `[privacy] mode = "distributed"`, whose clients each add a part of the noise under masks.

    How much follows from the number of clients, so a round opens only with all of `[cohort] clients`.
    """

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        return plan.privacy.mode == "distributed"

    def may_open(self, running: RunContext, cohort: Cohort, min_updates: int) -> bool:
        return len(cohort.selected) == self.plan.cohort.clients and super().may_open(running, cohort, min_updates)


class CentralMode(SpendingRounds):
    """Rounds with `[privacy] mode = "central"`."""

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        return plan.privacy.mode == "central"

    def aggregator(self, running: RunContext, opened: RoundOpened, caps: WeightCaps | None = None) -> PrivateAggregator:
        del caps
        noise, clients = self.noise(running), self.divisor(running, opened.round)
        made = PrivateAggregator(
            self.plan, running.layout, partial(assigned_codec, running), noise, clients, self.clip(running)
        )
        if (tree := self.tree(running)) is not None:
            assert isinstance(self.plan.cohort.clients, int), "the plan check demands it"
            made.sum.clients = self.plan.cohort.clients  # noise of a prefix cancels if all rounds are divided alike
            made.draw = partial(tree.draw, opened.round, last_step(running))
        return made

    def divisor(self, running: RunContext, number: int) -> float:
        """Return the number of clients by which the sum of a round is divided: those that it selected."""
        return running.run_state.ledger.selected(number)

    def tree(self, running: RunContext) -> TreeNoise | None:
        """Return the noise of the rounds of a run with `mechanism = "tree"`; None for other runs."""
        if self.plan.privacy.mechanism != "tree":
            return None
        length = length_of(self.plan.privacy, self.plan.run.rounds)
        return TreeNoise(running.versions.folder, self.noise(running), length)

    def reveal(self, running: RunContext, starts: bool = False) -> None:
        super().reveal(running, starts)
        if (tree := self.tree(running)) is not None:
            tree.settle(last_step(running))

    def abort(self, running: RunContext) -> None:
        super().abort(running)
        erase_keys(running.versions.folder)


def last_step(running: RunContext) -> int:
    """Return the last round that made a step; 0 before the first one."""
    return running.run_state.bases.made_by.get(running.run_state.version, 0)


class DeviceMode(SpendingRounds):
    """Rounds with `[privacy] mode` local or example, whose clients noise what they learned before they send it."""

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        return plan.privacy.mode in ("local", "example")

    def aggregator(self, running: RunContext, opened: RoundOpened, caps: WeightCaps | None = None) -> NoisedMean:
        del caps
        config = SumConfig(codec_of=partial(assigned_codec, running))
        return NoisedMean(self.plan, running.layout, opened.codec, config)


class PrivateAggregator(RoundAggregator):
    """The sum of one round's clipped updates, which is noised when the step is made.

    The mean is the noised sum divided by `selected`, the number of clients that the round selected, or that a sample
    has on average: how many replied could tell of their data.
    """

    def __init__(
        self,
        plan: RunPlan,
        layout: Layout,
        codec_of: Callable[[ReplyHeader], str],
        noise: NoisePlan,
        selected: float,
        clip: float,
    ) -> None:
        self.plan, self.layout, self.codec_of = plan, layout, codec_of  # the float sums of other rounds take memory
        self.algorithm, self.weights, self._bound = None, None, {}
        self.noise, self.rng = noise, SystemRng()
        self.draw: Draw = lambda out: noise.sampler.fill(out, self.rng)
        self.sum = PrivateSum(layout.model_size, clip, noise.scale, selected, self.rng, noise.count)

    @property
    def next_clip(self) -> float | None:
        """Return the clip of the next round, which follows from the noised count; None if it stays."""
        return None if self.sum.share is None else next_clip(self.sum.clip, self.sum.share)

    def _add(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        del discount
        expected = [f"frame/{i}" for i in range(len(self.layout.segments))]
        if (names := [part.name for part in header.parts]) != expected:
            raise BadPayload(
                f"an update with the parts {', '.join(names)[:80]}", why=f"expected {len(expected)} frames"
            )
        try:
            update = self._decoded(self._codec(header), frames)
            if self.plan.privacy.clipping == "per-layer":
                clip_layers(update, self.layout.model_tensors, self.sum.clip)
            self.sum.add(update)
        except NotRounded as error:
            raise BadPayload("an update that is not in the sum", why=str(error)) from error
        except NonFiniteUpdate as error:
            raise BadPayload("an update with NaN or infinity", why=error.what) from error
        except DataLost as error:  # the spool is in no backup of a private run
            raise BadPayload("an update that is not readable", why=error.what) from error

    def _decoded(self, codec: BoundCodec, frames: Frames) -> Vector:
        into, found = np.zeros(self.layout.size, np.float32), 0
        for segment, payload in zip(self.layout.segments, frames(), strict=False):
            codec.decode_add(payload, 1.0, into[segment.span], segment=segment.index)
            found += 1
        if found != len(self.layout.segments):
            raise BadPayload(f"an update of {found} frames", why=f"the model has {len(self.layout.segments)} segments")
        return into

    def fits(self) -> bool:
        """Return True: each update is bounded by the clip."""
        return True

    def capped(self, caps: WeightCaps, headers: Iterable[ReplyHeader]) -> dict[str, Capped]:
        """Return {}: all clients count alike."""
        return {}

    def _change(self, model: Model) -> tuple[Vector | None, State]:
        del model
        return self.sum.release(self.draw), {}


class NoisedMean(RoundAggregator):
    """The mean of updates that their clients have noised: all count alike, because none tells a number of examples.

    It is divided by the number of updates in it. That adds nothing to what the updates tell.
    """

    def _add(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        try:
            for _ in frames():
                pass
        except DataLost as error:  # the spool is in no backup of a private run
            raise BadPayload("an update that is not readable", why=error.what) from error
        super()._add(replace(header, examples=1, a=1.0), frames, discount)

    def capped(self, caps: WeightCaps, headers: Iterable[ReplyHeader]) -> dict[str, Capped]:
        """Return {}: all clients count alike."""
        return {}


class SampledMode(CentralMode):
    """Rounds with `[privacy] mode = "central"` and `sampling_rate`."""

    shares_devices = False

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        return CentralMode.is_for(plan) and plan.privacy.sampling_rate is not None

    @property
    def rate(self) -> float:
        """Return the probability of each device to be in a round."""
        assert self.plan.privacy.sampling_rate is not None, "is_for demands it"
        return self.plan.privacy.sampling_rate

    def population(self, running: RunContext) -> Sequence[str]:
        """Return the devices that have a coin in each round, sorted: fixed when the first round opens."""
        if running.run_state.rounds_opened:
            return sorted(running.run_state.considered)
        enrolled = set(running.online.names)
        if not running.simulated:
            enrolled |= {row.name for row in running.store.roster.rows() if row.state == "approved"}
        return sorted(enrolled - self.budget.barred(running).keys())

    def excluded(self, running: RunContext, device: str) -> str:
        """Return "": a device that may spend no more ends the run, since each one pays whether or not it is sampled."""
        return ""

    def select(self, running: RunContext, number: int) -> Cohort:
        """Return a Poisson sample of the population; its clients' assignments of earlier rounds are given up first."""
        for device, assignments in running.outstanding().items():
            for assignment in assignments:
                running.lose(device, "stale", "its round has ended", assignment.assignment_id)
        population, barred = tuple(self.population(running)), self.budget.barred(running)
        sample = poisson_sample(population, self.rate, SystemRng())
        selected = tuple(device for device in sample if device not in barred)  # a barred device is as an absent one
        return Cohort(population, selected, 0, 0, len(population), {})

    def min_updates(self, wanted: int) -> int:
        """Return 0: a round makes a step whatever its sample is."""
        return 0

    def may_open(self, running: RunContext, cohort: Cohort, min_updates: int) -> bool:
        """Return True: a round opens whoever is there."""
        return True

    def can_continue(self, running: RunContext) -> bool:
        """Return True once the run has begun: from then on no round waits for devices, but for other runs to end."""
        return running.run_state.rounds_opened > 0 and not running.leases.begin(running.run_id)

    def connected(self, running: RunContext) -> set[str]:
        """Return the population: the status names those for whom the run waits, and samples alone get assignments."""
        return running.run_state.considered

    def notes(self, able: int) -> list[Reason]:
        """Return the public numbers of the run's samples: `able` is the size of the population."""
        return [Reason("poisson", {"rate": self.rate, "population": able, "expected": self.rate * able})]

    def config(self, opened: RoundOpened) -> RoundConfig:
        return replace(super().config(opened), target_updates=0, min_updates=0)

    def machine(self, opened: RoundOpened, running: RunContext) -> RoundMachine:
        return SampledRound(self.config(opened))

    def divisor(self, running: RunContext, number: int) -> float:
        """Return the expected number of clients in a round."""
        return self.rate * len(running.run_state.considered)

    def summed_together(self, running: RunContext, number: int) -> int:
        """Return the expected number of updates in a sum: no client may learn the size of the sample."""
        return max(1, round(self.divisor(running, number)))

    def require_budget(self, running: RunContext) -> None:
        population = self.population(running)
        self.budget.require_delta(len(population))
        self.budget.require_all(running, population, self.noise(running).release)

    def reserved(self, running: RunContext, opened: RoundOpened) -> list[Event]:
        self.require_budget(running)
        return self.budget.reserved_for_all(running, opened, self.noise(running).release)


class SampledRound(Round):
    """A round that ends at its deadline, whatever its sample is and whoever has replied.

    >>> from thinwire.server.round_events import RoundConfig, Tick
    >>> one = SampledRound(RoundConfig(1, 0, {}, target_updates=0, min_updates=0, opened_s=0, deadline_s=60))
    >>> one.on(Tick(), now=59.0), [closed.reason for closed in one.on(Tick(), now=60.0)]
    ([], ['deadline'])
    """

    def _closing_reason(self, now: float) -> CloseReason | None:
        return "deadline" if now >= self.deadline_at else None
