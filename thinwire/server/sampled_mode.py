"""Rounds with `[privacy] sampling_rate`: each device of the population is in a round by a secret coin of its own.

Poisson sampling makes the epsilon of those smaller who see the released models and do not know who was sampled
(`privacy/accounting.py`). That holds only if nothing but the coins decides, and nothing shows their result:

- The population is every enrolled and approved device when the first round opens. The first `RoundOpened` journals it,
  and it stays fixed: a device that enrolls later is in no round of the run, and one that is revoked is only absent.
- Coins are drawn once a round, in the transaction that opens it, for absent and busy devices too. Nothing replaces an
  absent device, and no round waits for devices.
- The sum is divided by the expected sample, rate times population, whatever the sample is.
- A round ends at its deadline, also when all have replied or nobody was sampled: when a model is released tells
  nothing. An empty sample is released as noise. So no count of a sample is a reason of anything that others see.
- Each client of the population pays for each round, at the rate, in one entry of the ledger without participants.

The journal has the sample, for a restart. What the journal shows others is `core.protection_events.without_sample`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thinwire.core.formatting import Reason
from thinwire.privacy.secret_rng import SystemRng
from thinwire.server.policy.cohort import Cohort, poisson
from thinwire.server.private_mode import CentralMode
from thinwire.server.round import Round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thinwire.core.events import CloseReason, Event, RoundOpened
    from thinwire.core.plan import RunPlan
    from thinwire.server.context import RunContext
    from thinwire.server.round import RoundMachine
    from thinwire.server.round_events import RoundConfig


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
        if running.past.rounds_opened:
            return sorted(running.past.considered)
        here = set(running.presence.devices)
        if not running.simulated:
            here |= {row.name for row in running.store.roster.rows() if row.state == "approved"}
        return sorted(here - self.budget.barred(running).keys())

    def excluded(self, running: RunContext, device: str) -> str:
        """Return "": a device that may spend no more ends the run, since each one pays whether or not it is sampled."""
        return ""

    def select(self, running: RunContext, number: int) -> Cohort:
        """Return a Poisson sample of the population; its clients' assignments of earlier rounds are given up first."""
        for device, assignments in running.outstanding().items():
            for selected in assignments:
                running.lose(device, "stale", "its round has ended", selected.assignment_id)
        population, barred = tuple(self.population(running)), self.budget.barred(running)
        sample = poisson(population, self.rate, SystemRng())
        here = tuple(device for device in sample if device not in barred)  # a barred device is as an absent one
        return Cohort(population, here, 0, 0, len(population), {})

    def min_updates(self, wanted: int) -> int:
        """Return 0: a round makes a step whatever its sample is."""
        return 0

    def may_open(self, running: RunContext, cohort: Cohort, min_updates: int) -> bool:
        """Return True: a round opens whoever is there."""
        return True

    def can_continue(self, running: RunContext) -> bool:
        """Return True once the run has begun: from then on no round waits for devices, but for other runs to end."""
        return running.past.rounds_opened > 0 and not running.leases.begin(running.run_id)

    def notes(self, able: int) -> list[Reason]:
        """Return the public numbers of the run's samples: `able` is the size of the population."""
        return [Reason("poisson", {"rate": self.rate, "population": able, "expected": self.rate * able})]

    def terms(self, opened: RoundOpened) -> RoundConfig:
        return replace(super().terms(opened), target_updates=0, min_updates=0)

    def machine(self, opened: RoundOpened, running: RunContext) -> RoundMachine:
        return SampledRound(self.terms(opened))

    def divisor(self, running: RunContext, number: int) -> float:
        """Return the expected number of clients in a round."""
        return self.rate * len(running.past.considered)

    def summed_together(self, running: RunContext, number: int) -> int:
        """Return about how many updates are aggregated together: the sample's own size is told to no client."""
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

    def _shutting(self, now: float) -> CloseReason | None:
        return "deadline" if now >= self.deadline_at else None
