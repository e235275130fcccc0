"""This module follows what a private run spends round by round.

`SpendingHistory` follows the ledger of one run. A page reads it after each event, so an event that spends nothing reads
no entry, and a new round reads its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thinwire.privacy.meaning import meaning
from thinwire.reports.privacy import (
    EVERYONE,
    Spending,
    Tally,
    assumptions,
    largest_epsilon,
    spent_text,
)
from thinwire.store.read_models import population_of, privacy_section

if TYPE_CHECKING:
    from thinwire.store import PrivacyRow, RunRow, Store

STOPPED = 7  # the exit code of a run that ends before a budget is passed


@dataclass(frozen=True)
class PrivacyState:
    """Holds what a private run has spent until now, with the sentences that explain it.

    `bound` is the epsilon that the plan must not pass: [privacy] budget over all runs of the population, else
    target_epsilon of this run; None if the plan has neither. `bound_name` is the key of the plan. `stopped` is the
    reason if the run ended before its budget would be passed, and `unknown` why the ledger may lack entries.
    """

    spending: Spending
    sentence: str
    meaning: str
    assumes: tuple[str, ...]
    bound: float | None
    bound_name: str
    stopped: str
    unreleased: str
    unknown: str


class SpendingHistory:
    """Follows what one run and its population spend, as the ledger grows.

    Invariant: `by_round` has epsilon of the most expensive client after each reserved round, of this run alone and over
    all runs of its population, and what it holds is what one reading of the whole ledger gives.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._forget()

    def _forget(self) -> None:
        self._last, self._entries, self._parts = 0, 0, 0
        self._tally = Tally()
        self._all, self._alike = defaultdict[str, Counter[str]](Counter), Counter[str]()
        self._have_spent, self._all_have_spent = set[str](), False  # since the last entry of the run
        self._largest: tuple[float | None, float | None] = (0.0, 0.0)
        self._spending: Spending | None = None
        self.by_round = dict[int, tuple[float | None, float | None]]()

    def follow(self, run: RunRow) -> PrivacyState | None:
        """Read what was added to the ledger since the last call; return None for a run without privacy."""
        privacy, population = privacy_section(run), population_of(run)
        if privacy.mode == "off":
            return None
        entries, parts, released = self._store.privacy.size(population, run.run_id)
        if (entries, parts) != (self._entries, self._parts) or self._spending is None:
            self._read(run, population, privacy.delta)
            if (self._entries, self._parts) != (entries, parts):  # an entry that was read has another participant
                self._forget()
                self._read(run, population, privacy.delta)
            self._spending = self._spent(run, population)
        spending = replace(self._spending, released=released)
        is_budget = privacy.budget is not None
        stopped = run.status_text if run.status == "failed" and run.exit_code == STOPPED else ""
        return PrivacyState(
            spending,
            spent_text(spending, privacy.budget),
            meaning(spending.epsilon_run, privacy.delta, privacy.mode),
            assumptions(spending, run.source == "sim"),
            privacy.budget if is_budget else privacy.target_epsilon,
            "" if not is_budget and privacy.target_epsilon is None else "budget" if is_budget else "target_epsilon",
            f"The run stopped before its budget would be passed: {stopped}." if stopped else "",
            spending.unreleased,
            self._store.privacy.unknown().get(population, ""),
        )

    def _read(self, run: RunRow, population: str, delta: float) -> None:
        for row in self._store.privacy.rows(population, after=self._last):
            self._last, self._entries = row.id, self._entries + 1
            self._parts += len(row.devices)
            if row.release and not row.devices:  # settled, or of a run with Poisson sampling
                self._alike[row.release] += row.count
                self._all_have_spent = True
            for client in row.devices:
                self._all[client][row.release] += row.count
            self._have_spent.update(row.devices)
            if row.run_id == run.run_id and row.release:
                self._tally.add(row)
                self.by_round[row.round] = self._largest = self._after(row, delta)

    def _after(self, row: PrivacyRow, delta: float) -> tuple[float | None, float | None]:
        """Return the largest epsilons after an entry of the run.

        No epsilon ever falls, so only the clients that have spent since the run's last entry are looked at.
        """
        own = self._tally.own
        run = largest_epsilon((own[client] for client in row.devices or (EVERYONE,)), delta)
        of_run = self._have_spent if EVERYONE in own else self._have_spent & own.keys()
        some = (self._all[client] + self._alike for client in of_run)
        every = largest_epsilon(self._whole() if self._all_have_spent else some, delta)
        self._have_spent.clear()
        self._all_have_spent = False
        return _larger(self._largest[0], run), _larger(self._largest[1], every)

    def _whole(self) -> list[Counter[str]]:
        """Return what the clients of the run have spent in all runs of the population, equal spendings once."""
        own = self._tally.own
        clients = {*self._all, *own} if EVERYONE in own else own.keys()
        distinct = {frozenset(self._all[client].items()) for client in clients & self._all.keys()}
        distinct |= {frozenset()} if clients - self._all.keys() else set()
        return [Counter(dict(one)) + self._alike for one in distinct]

    def _spent(self, run: RunRow, population: str) -> Spending:
        privacy = privacy_section(run)
        if not self._tally.own:
            rate = privacy.sampling_rate or 1.0
            return Spending(run.run_id, population, privacy.mode, privacy.delta, rate=rate)
        return self._tally.spending(self._whole(), privacy)


def _larger(one: float | None, other: float | None) -> float | None:
    """Return the larger of two epsilons; None, which has no bound, is the largest."""
    return None if one is None or other is None else max(one, other)
