"""This module follows what a private run spends round by round, and says in plain words what an epsilon means.

`SpendingHistory` follows the ledger of one run. A page reads it after each event, so an event that spends nothing reads
no entry, and a new round reads its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING

from thinwire.core.formatting import rounded_up
from thinwire.reports.privacy import (
    EVERYONE,
    Spending,
    assumptions,
    largest_epsilon,
    spending_from,
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
        self._own, self._rows = defaultdict[str, Counter[str]](Counter), list["PrivacyRow"]()
        self._all, self._alike = defaultdict[str, Counter[str]](Counter), Counter[str]()
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
                if row.run_id == run.run_id:
                    self._own[EVERYONE][row.release] += row.count
            for client in row.devices:
                self._all[client][row.release] += row.count
                if row.run_id == run.run_id:
                    self._own[client][row.release] += row.count
            if row.run_id == run.run_id and row.release:
                self._rows.append(row)
                own = largest_epsilon(self._own.values(), delta)
                self.by_round[row.round] = own, largest_epsilon(self._whole().values(), delta)

    def _whole(self) -> dict[str, Counter[str]]:
        """Return what each client of the run has spent in all runs of the population."""
        clients = {*self._all, *self._own} if EVERYONE in self._own else self._own.keys()
        return {client: self._all.get(client, Counter()) + self._alike for client in clients}

    def _spent(self, run: RunRow, population: str) -> Spending:
        privacy = privacy_section(run)
        if not self._rows:
            rate = privacy.sampling_rate or 1.0
            return Spending(run.run_id, population, privacy.mode, privacy.delta, rate=rate)
        return spending_from(self._rows, self._whole(), privacy)


def right_guesses(epsilon: float, delta: float) -> float:
    """Return how often someone guesses right, at most, whether one client's data were used, if both are as likely.

    The bound is (e^epsilon + delta) / (1 + e^epsilon) (Kairouz, Oh, Viswanath 2015, the vertices of their region).

    >>> right_guesses(0.0, 0.0), round(right_guesses(1.0, 0.0), 4)
    (0.5, 0.7311)
    """
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


def percent_up(share: float) -> str:
    """Format a share in percent, never below its value, with as many digits as tell it from 100.

    >>> percent_up(0.73106), percent_up(0.5), percent_up(0.999665), percent_up(1.0)
    ('73.2 %', '50 %', '99.97 %', '100 %')
    """
    exact = Decimal(repr(share)) * 100
    steps = (exact.quantize(Decimal(step), ROUND_CEILING) for step in ("0.1", "0.01", "0.001", "0.0001"))
    return f"{float(next((up for up in steps if up < 100), 100)):g} %"


def meaning(epsilon: float | None, delta: float, mode: str = "central") -> str:
    """Return what an epsilon of a mode means for one client, or for one of its records, as sentences in plain words.

    >>> meaning(1.0, 0.0)[:101]
    'Someone who sees all released models, and holds it as likely as not that the data of one client were '
    """
    data = "one record of a device" if mode == "example" else "one client"
    if epsilon is None or not math.isfinite(epsilon):
        return f"No epsilon bounds what the released models tell of {data}."
    bet = percent_up(right_guesses(epsilon, delta))
    times = rounded_up(math.exp(min(epsilon, 700.0)))
    said = (
        f"Someone who sees all released models, and holds it as likely as not that the data of {data} were used, "
        f"guesses right in at most {bet} of such bets (50 % is a coin). What that person sees is at most {times} times "
        f"as likely with these data as without, except with the probability delta = {delta:g}."
    )
    return said + (" So large a bound protects no one by itself." if epsilon > 10 else "")
