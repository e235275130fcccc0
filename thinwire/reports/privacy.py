"""Reports of differential privacy: what the clients of a run and of a population have spent, by the ledger.

The figures come from the ledger's releases alone, at the delta of each run's plan. A round is spent by each client that
it selected, whether or not a model was released, so a reservation counts as much as a release. An epsilon is an upper
bound, and is rounded up where it is shown. `last_contacts` keeps the samples of an amplified run secret.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from thinwire.core.clock import heard_by
from thinwire.core.errors import DataLost
from thinwire.core.events import ENDED
from thinwire.core.formatting import counted, rounded_up
from thinwire.core.link_state import SUSPECT_S
from thinwire.core.plan_values import PrivacySection
from thinwire.core.run_events import is_sampled
from thinwire.privacy.accounting import epsilon_of, releases_of, unit_of_all
from thinwire.privacy.meaning import UNITS, unit_text
from thinwire.store.read_models import population_of, privacy_section

if TYPE_CHECKING:
    from pathlib import Path

    from thinwire.store import PrivacyRow, RunRow, Store

TRUSTED: Final[Mapping[str, str]] = {
    "central": "The aggregator is trusted: it sees every update in the clear, and no device can check the epsilon, "
    "which is the aggregator's claim.",
    "distributed": "The aggregator sees sums that have the clients' noise; the epsilon counts on the fewest honest "
    "clients that [secure] allows in a sum. A client that reads the models counts as a corrupt one (max_corrupt), "
    "because it can take its own noise off.",
    "local": "Nobody else is trusted: each device noises its own update before it sends it, and counts it in its own "
    "ledger (thinwire client privacy).",
    "example": "Nobody else is trusted: each device noises each step of its training, and counts in its own ledger "
    "(thinwire client privacy). All records of a device together are not protected.",
}
SIMULATED: Final = (
    "A simulation protects nothing, because one process has the data of all clients; this is what the plan would cost "
    "on devices."
)
UNAMPLIFIED: Final = "No amplification by sampling is counted, and a client pays for each round that selects it."
AMPLIFIED: Final = (
    "It counts on secret sampling: only a device knows which of its records are in a batch. A device pays for each "
    "round that selects it."
)
TREE: Final = (
    "Noise is that of tree aggregation: a client pays in each round for all sums that its update will be in. The "
    "aggregator and the devices keep rounds of one client at least {} apart."
)
SAMPLED: Final = (
    "Amplification by Poisson sampling at rate {rate:g} is counted, and each client of the population pays for each "
    "round, sampled or not. It holds against those who see released models and do not know who was sampled: the "
    "aggregator's operator, its journal and its backups have the samples. A device knows when it was sampled, so its "
    "own ledger books each such round in full."
)
EVERYONE: Final = "each client of the population"  # in place of a client's name: of a release without participants


@dataclass(frozen=True)
class Spending:
    """Holds what one run has spent of the privacy of its population.

    `reserved` counts its rounds, and `released` those with a model. `sensitivity` is in grid steps, the largest of its
    releases, and `noise_to_sensitivity` the least of theirs: the plan's noise multiplier less what rounding to the grid
    adds to the sensitivity. `participations` is the most rounds of one client in this run. `epsilon_run` is what the
    run cost its most expensive client, and `epsilon` the most that one of its clients has spent in all runs of the
    population, settled rounds included. Both are at `delta`; None if they have no bound, or if a newer version wrote a
    release. `of_records` is True if any release of these clients hides one record: then `epsilon` is for a record too.

    With `[privacy] sampling_rate`, which is `rate`, each client takes part in no more rounds than `participations`, and
    `clients` is 0: the ledger has one entry for all of them.
    """

    run_id: str
    population: str
    mode: str
    delta: float
    reserved: int = 0
    released: int = 0
    clients: int = 0
    participations: int = 0
    epsilon_run: float | None = 0.0
    epsilon: float | None = 0.0
    distributions: tuple[str, ...] = ()
    noise_to_sensitivity: float | None = None
    sensitivity: float | None = None
    of_records: bool = False
    rate: float = 1.0

    @property
    def unreleased(self) -> str:
        """Return how many reserved rounds have no released model, as a sentence; "" if there is none."""
        if not (count := self.reserved - self.released):
            return ""
        have = "has" if count == 1 else "have"
        return (
            f"{self.run_id}: {count} of {counted(self.reserved, 'reserved round')} {have} no released model (open, "
            "ended without a step, or lost in a crash), and a reservation stays spent"
        )


def spending_of_run(store: Store, run: RunRow) -> Spending | None:
    """Return what a private run has spent, also before its first round; None for a run without privacy."""
    privacy = privacy_section(run)
    if privacy.mode == "off":
        return None
    population = population_of(run)
    found = ledger(store.privacy.rows(population), {run.run_id: run})
    empty = Spending(run.run_id, population, privacy.mode, privacy.delta, rate=privacy.sampling_rate or 1.0)
    return next((one for one in found if one.run_id == run.run_id), empty)


def ledger(rows: Sequence[PrivacyRow], runs: Mapping[str, RunRow]) -> list[Spending]:
    """Return what each run has spent, by population and in the order of their first rounds.

    `rows` are all entries of the populations of interest, and `runs` gives each run's plan. A run whose plan is not
    known is counted at the default delta.
    """
    of_run, spent = defaultdict[tuple[str, str], Tally](Tally), _by_client(rows)
    for row in rows:
        if row.run_id and row.release:
            of_run[row.population, row.run_id].add(row)
    found = []
    for (population, run_id), tally in of_run.items():
        clients = spent[population] if EVERYONE in tally.own else tally.own
        privacy = privacy_section(runs[run_id]) if run_id in runs else PrivacySection()
        found.append(tally.spending([spent[population][client] for client in clients], privacy))
    return found


def _by_client(rows: Iterable[PrivacyRow]) -> dict[str, dict[str, Counter[str]]]:
    """Return how often each client of each population spent each release; those without participants count for all."""
    alike, found = defaultdict[str, Counter[str]](Counter), defaultdict[str, dict[str, Counter[str]]](dict)
    for row in rows:
        if row.release and not row.devices:
            alike[row.population][row.release] += row.count
            found[row.population].setdefault(EVERYONE, Counter())
        for client in row.devices:
            found[row.population].setdefault(client, Counter())[row.release] += row.count
    return {
        name: {client: counts + alike[name] for client, counts in clients.items()} for name, clients in found.items()
    }


class Tally:
    """Adds up what one run spends, entry by entry: one more entry costs as much after thousands as after none."""

    def __init__(self) -> None:
        self.own = defaultdict[str, Counter[str]](Counter)  # client -> its releases in this run
        self._rounds, self._of_client = dict[int, bool](), defaultdict[str, set[int]](set)
        self._releases, self._run = dict[str, int](), ("", "")

    def add(self, row: PrivacyRow) -> None:
        """Add an entry of the run."""
        self._run, self._releases[row.release] = (row.run_id, row.population), 1
        self._rounds[row.round] = self._rounds.get(row.round, False) or row.state == "committed"
        for client in row.devices or (EVERYONE,):
            self.own[client][row.release] += row.count
            self._of_client[client].add(row.round)

    def spending(self, whose: Sequence[Counter[str]], privacy: PrivacySection) -> Spending:
        """Return what the run spent; `whose` are the releases of each of its clients in all runs of the population."""
        try:
            releases = list(releases_of(self._releases))
        except DataLost:  # a newer version wrote it
            releases = []
        everything = Counter[str]()
        for counts in whose:
            everything += counts
        noises = [math.sqrt(one.variance) / one.sensitivity for one in releases if one.sensitivity]
        return Spending(
            *self._run, privacy.mode, privacy.delta,
            reserved=len(self._rounds),
            released=sum(self._rounds.values()),
            clients=len(self.own.keys() - {EVERYONE}),
            participations=max(map(len, self._of_client.values()), default=0),
            epsilon_run=largest_epsilon(self.own.values(), privacy.delta),
            epsilon=largest_epsilon(whose, privacy.delta),
            distributions=tuple(sorted({one.distribution for one in releases})),
            noise_to_sensitivity=min(noises, default=None),
            sensitivity=max((one.sensitivity for one in releases), default=None),
            of_records=bool(releases) and _is_of_records(everything),
            rate=privacy.sampling_rate or 1.0,
        )  # fmt: skip


def _is_of_records(spent: Mapping[str, int]) -> bool:
    try:
        return unit_of_all(spent) == "record"
    except DataLost:  # a newer version wrote it, and no epsilon is claimed
        return False


def largest_epsilon(spendings: Iterable[Mapping[str, int]], delta: float) -> float | None:
    """Return the largest epsilon of several clients, None without a bound; equal spendings are counted once."""
    distinct = {frozenset(one.items()) for one in spendings}
    try:
        found = max((_epsilon_of(one, delta) for one in distinct), default=0.0)
    except DataLost:
        return None
    return found if math.isfinite(found) else None


@lru_cache(maxsize=4096)
def _epsilon_of(spent: frozenset[tuple[str, int]], delta: float) -> float:
    """Return the epsilon of these releases with their counts; the clients of a run spend the same again and again."""
    return epsilon_of(dict(spent), delta)


def spent_text(spending: Spending, budget: float | None = None) -> str:
    """Return what a run has spent so far as one sentence."""
    if not spending.reserved:
        return f"epsilon 0 so far: no round is reserved; delta = {spending.delta:g}"
    of_budget = "" if budget is None else f" of [privacy] budget = {budget:g}"
    whom = f"the client that took part most, in {spending.participations} of {counted(spending.reserved, 'round')}"
    if spending.rate < 1:
        whom = f"{EVERYONE}, in {counted(spending.reserved, 'round')}"
    said = (
        f"epsilon {rounded_up(spending.epsilon_run)} at delta = {spending.delta:g} is spent by {whom} "
        f"({spending.released} released)"
    )
    if spending.epsilon != spending.epsilon_run or budget is not None:
        all_runs = f"{rounded_up(spending.epsilon)}{of_budget}"
        said += f"; in all runs of the population {spending.population}: {all_runs}"
        if spending.of_records and spending.mode != "example":
            said += f", for {UNITS['record']}, because runs of mode example are among them"
    return said


def assumptions(spending: Spending, is_simulated: bool) -> tuple[str, ...]:
    """Return the unit of privacy and what must hold for the epsilon of a run to be true, as sentences."""
    trusted = SIMULATED if is_simulated else TRUSTED.get(spending.mode, "")
    if not is_simulated and spending.mode == "central":
        trusted = trusted.replace("sees", "saw")
    said = sampling_text(spending.mode, spending.rate)
    return tuple(filter(None, (f"Unit of privacy: {unit_text(spending.mode)}.", trusted, said)))


def sampling_text(mode: str, rate: float = 1.0) -> str:
    """Return whether the epsilon of a mode, with clients sampled at a rate, counts on sampling, and against whom."""
    if rate < 1:
        return SAMPLED.format(rate=rate)
    return AMPLIFIED if mode == "example" else UNAMPLIFIED


def private_lines(store: Store, run: RunRow) -> Iterator[str]:
    """Yield what a private run has spent so far and what its epsilon assumes, as sentences; nothing for other runs."""
    if (spent := spending_of_run(store, run)) is None:
        return
    yield spent_text(spent, privacy_section(run).budget)
    if spent.unreleased:
        yield spent.unreleased
    if why := store.privacy.unknown().get(spent.population):
        yield f"More may be spent in the population {spent.population}: {why}."
    yield from assumptions(spent, run.source == "sim")
    if (privacy := privacy_section(run)).mechanism == "tree":
        yield TREE.format(privacy.min_separation)


def last_contacts(runs: Sequence[RunRow], lock: Path | None) -> dict[str, float]:
    """Return the wall-clock time of the last contact of each online device, as far as it may be shown.

    During a run with Poisson sampling it would tell who was sampled. An assignment ends the waiting pull of a sampled
    device when a round opens, and the device calls again at once. The others call when their own pulls end. So until
    such a run is over, and until each device has called after it, every online device is shown as heard just now.
    `runs` are all runs, with those that a person has deleted since: a deletion makes no contact older. The times come
    from the record beside the lock; without one the result is empty.
    """
    heard, now = heard_by(lock) if lock else {}, time.time()
    return dict.fromkeys(heard, now) if any(_hides(run, now) for run in runs) else heard


def _hides(run: RunRow, now: float) -> bool:
    """Return True if the present contacts of devices may tell who was sampled in a run."""
    is_unbegun = run.status in ("preparing", "queued") and run.started_at is None
    if run.source != "devices" or is_unbegun or not is_sampled(run.plan):
        return False
    return run.status not in ENDED or now - (run.finished_at or 0.0) <= 2 * SUSPECT_S
