"""`PrivacyBudget` decides which clients of a private run may take part in another round, by what they have spent.

The unit is one client with all its data. A client spends the cost of a round in which it is selected, whether or not it
replies, and spending in all runs of one population adds up. The ledger is a table of the store, written in the
transactions that open and close rounds.

A client that has reached `[privacy] max_participations`, or for which one more round would pass `[privacy] budget`, is
not selected again. If so few clients are left that no round can be opened, the run ends with `BudgetSpent`. A client
that took part within the last `[privacy] min_separation` - 1 rounds is not selected now, and the run waits for others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from thinwire.core.errors import BudgetSpent, DataLost, PlanError, TooFewClients
from thinwire.core.formatting import counted, rounded_up
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved
from thinwire.privacy.accounting import Budget, Release, epsilon
from thinwire.privacy.noise_plan import participations_of
from thinwire.server.policy.cohort import min_updates_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thinwire.core.events import Event, RoundOpened
    from thinwire.core.plan import RunPlan
    from thinwire.server.context import RunContext

MAX_PARTICIPATIONS = "has taken part in {} rounds of this run, the most of [privacy] max_participations"
PLANNED = "has taken part in {} rounds of this run, for as many as its noise is planned; one without a model counts too"
MIN_SEPARATION = "took part in round {}, and [privacy] min_separation = {} lets it take part again from round {} on"
BLOCKED = "may spend nothing while the privacy ledger lacks entries"
BUDGET = "would pass [privacy] budget = {:g} with one more round: {} at delta = {:g} are spent"


class PrivacyBudget:
    """Decides for the rounds of one run which clients may spend, and records what they spend."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self._spent: Mapping[str, Mapping[str, int]] | None = None  # as of the last opening
        self._first: Release | None = None  # of the population's ledger
        self._here: dict[str, list[int]] | None = None  # device -> the rounds of this run in which it was selected
        self._bearers: Mapping[str, tuple[str, ...]] = {}  # as of `_here`
        self._barred: Mapping[str, str] = {}
        self._is_blocked = False  # as `blocked` said last
        self._online: frozenset[str] = frozenset()  # devices when `_barred` was read; a new one may be barred

    def population(self, running: RunContext) -> str:
        """Return the name of the population whose spending adds up over its runs; a simulated run has its own."""
        named = self.plan.privacy.population or self.plan.run.task
        return f"simulation of {running.run_id}" if running.simulated else named

    def blocked(self, running: RunContext) -> str:
        """Return why no round may spend while the ledger may lack entries, as after a restored backup; "" if one may.

        The run waits meanwhile, and selects nobody.
        """
        why = "" if running.simulated else running.store.privacy.blocked(self.population(running))
        if bool(why) != self._is_blocked:
            self._is_blocked, self._spent = bool(why), None
        return why and f"waiting for the privacy ledger: {why}"

    def excluded(self, running: RunContext, device: str, release: Release) -> str:
        """Return why a device may not spend another round, as a phrase about it; "" if it may.

        While the ledger is blocked the run waits for that, whatever a device has spent.
        """
        if self._is_blocked:
            return ""
        try:
            return self._why_not_now(running, device, release)
        except DataLost:  # since `blocked` was called
            return BLOCKED

    def _why_not_now(self, running: RunContext, device: str, release: Release) -> str:
        """Return what `excluded` does; raise `DataLost` while the ledger may lack entries."""
        why = self._why_spent_out(running, device, release)
        rounds, apart = self._read(running)[1].get(device, [0]), self.plan.privacy.min_separation
        if not why and rounds[-1] > 0 and running.run_state.rounds_opened + 1 < rounds[-1] + apart:
            return MIN_SEPARATION.format(rounds[-1], apart, rounds[-1] + apart)
        return why

    def barred(self, running: RunContext) -> Mapping[str, str]:
        """Return the devices that take part in nothing until a person has charged them, with the reason."""
        return running.store.privacy.excluded(self.population(running))

    def _why_spent_out(self, running: RunContext, device: str, release: Release) -> str:
        """Return why a device may not spend any further round of this run; "" if it may."""
        privacy, (spent, here) = self.plan.privacy, self._read(running)
        if device in self._barred:
            return self._barred[device]
        if len(here.get(device, ())) >= (most := participations_of(self.plan)):
            return (MAX_PARTICIPATIONS if most == self.plan.privacy.max_participations else PLANNED).format(most)
        if privacy.budget is None:
            return ""
        return self._over_budget(running, spent.get(device, {}), release)

    def _over_budget(self, running: RunContext, spent: Mapping[str, int], release: Release) -> str:
        """Return why one more release would pass the plan's budget; "" if it would not."""
        privacy = self.plan.privacy
        assert privacy.budget is not None, "the caller has looked"
        own = Counter({Release.from_json(text): count for text, count in spent.items()})
        if Budget(privacy.budget, privacy.delta, self._planned(running, release)).allows(own, release):
            return ""
        return BUDGET.format(privacy.budget, rounded_up(epsilon(own, privacy.delta)), privacy.delta)

    def _planned(self, running: RunContext, release: Release) -> Release | None:
        """Return the release for which `Budget` chooses its order: the first of the population's ledger, or this one.

        The choice has to be made before the first release and kept. A first release that is not sampled means none:
        the order is then that of a Gaussian mechanism, which fits sampled ones badly and is still valid for them.
        """
        if self._first is None:
            rows = running.store.privacy.rows(self.population(running))
            self._first = next((Release.from_json(row.release) for row in rows if row.release), release)
        return self._first if self._first.rate < 1 else None

    def require_delta(self, clients: int) -> None:
        """Raise `PlanError` if delta is not below 1 / clients: a release of one client's data would satisfy it.

        `clients` is the size of the population as the aggregator knows it now. In mode example delta is of records.
        """
        delta = self.plan.privacy.delta
        if self.plan.privacy.mode != "example" and delta * clients >= 1:
            raise PlanError(
                f"[privacy] delta = {delta:g} with {counted(clients, 'client')}",
                f"a release that publishes the data of one of {clients} clients would satisfy it",
                f"[privacy] delta = {1 / (10 * clients):.2g}",
            )

    def require_all(self, running: RunContext, population: Iterable[str], release: Release) -> None:
        """Raise `BudgetSpent` if one device of a sampled run may not spend another round: each one pays for each."""
        self._spent = None
        spent, _ = self._read(running)
        if self.plan.privacy.budget is None:
            return
        costs = {device: tuple(sorted(spent.get(device, {}).items())) for device in population}
        for cost in dict.fromkeys(costs.values()):  # most devices have spent the same
            if why := self._over_budget(running, dict(cost), release):
                device = next(device for device, own in costs.items() if own == cost)
                raise _budget_spent("each device of a sampled run pays for each round: no other is opened", device, why)

    def reserved_for_all(self, running: RunContext, opened: RoundOpened, release: Release) -> list[Event]:
        """Return what a sampled round spends: one release of each client of the population, so it names nobody."""
        return [
            PrivacyReserved(opened.at, opened.round, self.population(running), release.to_json(), [], opened.elapsed_s)
        ]

    def reserved(self, running: RunContext, opened: RoundOpened, release: Release) -> list[Event]:
        """Return what a round spends, before it is opened.

        Raise `BudgetSpent` if another run of the population has meanwhile spent what a selected client had left.
        """
        devices, self._spent = list(opened.assignments), None
        for device in devices:
            if why := self._why_not_now(running, device, release):
                raise _budget_spent(f"round {opened.round} is not opened", device, why)
        for device in devices:
            self._read(running)[1].setdefault(device, []).append(opened.round)
        self._spent = None
        return [
            PrivacyReserved(
                opened.at, opened.round, self.population(running), release.to_json(), devices, opened.elapsed_s
            )
        ]

    def released(self, running: RunContext, number: int, digest: str, next_clip: float | None) -> list[Event]:
        """Return that a round's model is released, and the clip of the next round if it follows from this one."""
        return [PrivacyCommitted(running.clock.wall(), number, digest, next_clip)]

    def require_clients(self, running: RunContext, release: Release) -> None:
        """Raise `BudgetSpent` if no round can be opened because of what the connected clients have spent, or because
        one round alone would pass the budget.

        Raise `TooFewClients` if a simulation waits for ever, since all its clients took part too short a time ago. In a
        run on devices another device may connect.
        """
        self._spent = None  # another run of the population may have spent since
        budget, delta = self.plan.privacy.budget, self.plan.privacy.delta
        if budget is not None and self._over_budget(running, {}, release):
            one = rounded_up(Budget(budget, delta, self._planned(running, release)).reached({release: 1}))
            said = f"costs epsilon {one} at delta = {delta:g}, and [privacy] budget = {budget:g}"
            raise _budget_spent("no round fits into the budget", "one round", said)
        excluded = {device: self._why_spent_out(running, device, release) for device in running.online.names}
        left = sum(not why for why in excluded.values())
        needed = self.plan.cohort.clients if isinstance(self.plan.cohort.clients, int) else 1
        if excluded and left < needed <= len(excluded):
            device, why = next((device, why) for device, why in excluded.items() if why)
            raise _budget_spent(
                f"a round needs {counted(needed, 'client')}, and {left} of {len(excluded)} may still spend", device, why
            )

        if not running.simulated or self.plan.privacy.min_separation == 1:
            return
        seen = running.online.ever_connected
        able = sum(not self.excluded(running, device, release) for device in seen)
        if seen and able < (least := min_updates_of(self.plan.cohort.min_updates, needed)):
            apart = self.plan.privacy.min_separation
            raise TooFewClients(
                f"a round needs {counted(least, 'client')}, and {able} of {len(seen)} may take part now",
                f"[privacy] min_separation = {apart} keeps rounds of one client apart, and no other client is there",
                f"at least {apart * needed} clients, or a smaller min_separation",
            )

    def _read(self, running: RunContext) -> tuple[Mapping[str, Mapping[str, int]], dict[str, list[int]]]:
        ledger, population = running.store.privacy, self.population(running)
        if (online := frozenset(running.online.names)) != self._online:
            self._online, self._spent = online, None
        if self._spent is None and self._bearers != (bearers := ledger.bearers()):
            self._bearers, self._here = bearers, None  # a device joined again with a new key
        if self._here is None:
            self._here = {}
            for row in ledger.rows(population):
                for device in row.devices if row.run_id == running.run_id else ():
                    self._here.setdefault(device, []).append(row.round)
        if self._spent is None:
            self._spent = ledger.spent_by_device(population, running.online.names, running.simulated)
            self._barred = ledger.excluded(population)
        return self._spent, self._here


def _budget_spent(what: str, device: str, why: str) -> BudgetSpent:
    hint = "more clients, more noise, or a larger [privacy] budget; what is spent stays spent"
    return BudgetSpent(what, f"{device} {why}", hint)
