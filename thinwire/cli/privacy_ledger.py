"""Print privacy ledgers: the aggregator's by population and run, and a device's own with what its figures mean."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.core import formatting
from thinwire.core.errors import DataLost
from thinwire.privacy.meaning import UNITS, meaning

if TYPE_CHECKING:
    from thinwire.client.privacy_ledger import DeviceLedger
    from thinwire.reports.privacy import Spending
    from thinwire.store import PrivacyRow


DELTA = 1e-5  # of a run whose plan names none, or is not known any more
OWN_DELTA = (
    "It is [policy] max_delta of this device. A run's page has the delta of its plan and counts one population, so its "
    "epsilon is another."
)
OWN_ASSUMPTIONS = (
    "Only the releases of this client are counted. What another device or client spent of the same data is missing.",
    "The ledger is whole. A ledger that was lost, or replaced by an older copy, counts too little.",
)
OWN_TRUST = (
    "If a run had mode central, the aggregator saw each update, and the epsilon is its claim: no device can check it.",
    "If a run had mode distributed, the epsilon counts on the noise of the fewest honest clients in a sum.",
    "If a run had mode local or example, nobody else is trusted, because this device added all the noise.",
)
HEADER = ("run", "rounds", "released", "noise", "devices", "epsilon", "delta")


@dataclass(frozen=True)
class Cost:
    """Holds what releases cost together: `epsilon` at `delta`; None if no epsilon can be claimed."""

    releases: int
    epsilon: float | None
    delta: float
    distributions: tuple[str, ...]
    unit: str = "client"

    @classmethod
    def of(cls, spent: Mapping[str, int], delta: float) -> Cost:
        """Return the cost of releases, by their JSON."""
        from thinwire.privacy.accounting import epsilon_of, releases_of, unit_of_all

        try:
            found, distributions = epsilon_of(spent, delta), sorted({one.distribution for one in releases_of(spent)})
            unit = unit_of_all(spent)
        except DataLost:  # a newer version wrote it: it is listed, and no epsilon is claimed
            return cls(sum(spent.values()), None, delta, ("unreadable",))
        claimed = found if math.isfinite(found) else None
        return cls(sum(spent.values()), claimed, delta, tuple(distributions), unit)

    @property
    def shown(self) -> str:
        """Return the epsilon in a table."""
        return "no bound" if self.epsilon is None else formatting.rounded_up(self.epsilon)

    @property
    def meaning(self) -> str:
        """Return what the epsilon means for the client, or for one of its records, in plain words."""
        return meaning(self.epsilon, self.delta, "example" if self.unit == "record" else "central")

    @property
    def sentence(self) -> str:
        """Return the cost in words."""
        count = formatting.counted(self.releases, "release")
        bound = "no bound on epsilon" if self.epsilon is None else f"epsilon {self.shown}"
        return f"{count}, {bound} at delta {self.delta:g}" + (" for one record" if self.unit == "record" else "")


def summaries(rows: Sequence[PrivacyRow], deltas: Mapping[str, float]) -> dict[str, Cost]:
    """Return the cost of all releases of each population, at the smallest delta of its runs."""
    found = dict[str, Cost]()
    for population in sorted({row.population for row in rows if row.population}):
        mine = [row for row in rows if row.population == population]
        delta = min((deltas.get(row.run_id, DELTA) for row in mine if row.run_id), default=DELTA)
        found[population] = Cost.of(_spent(mine), delta)
    return found


def _spent(rows: Iterable[PrivacyRow]) -> Counter[str]:
    spent = Counter[str]()
    for row in rows:
        if row.count:
            spent[row.release] += row.count
    return spent


def document(rows: Sequence[PrivacyRow], found: Mapping[str, Cost], blocked: Mapping[str, str]) -> dict[str, Any]:
    """Return the ledger as JSON: the cost by population, why private rounds are blocked, and all entries."""
    entries = [asdict(row) | {"release": _release(row.release), "devices": list(row.devices)} for row in rows]
    costs = {population: asdict(cost) for population, cost in found.items()}
    return {"populations": costs, "blocked": dict(blocked), "entries": entries}


def _release(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def show(
    rows: Sequence[PrivacyRow], found: Mapping[str, Cost], blocked: Mapping[str, str], deltas: Mapping[str, float],
    device: str | None,
) -> None:  # fmt: skip
    """Print a table with a row for each population and run, a sentence for each population, and what is blocked."""
    shown = []
    for population in found:
        mine = [row for row in rows if row.population == population]
        for run_id in dict.fromkeys(row.run_id for row in mine):
            of_run = [row for row in mine if row.run_id == run_id]
            cost = Cost.of(_spent(of_run), deltas.get(run_id, DELTA))
            released = sum(row.state == "committed" for row in of_run)
            devices = {name for row in of_run for name in row.devices}
            who = ", ".join(dict.fromkeys(row.who for row in of_run))
            begin = [run_id, len({row.round for row in of_run}), released] if run_id else [f"settled by {who}", "", ""]
            everyone = len(devices) or "all"
            end = [", ".join(cost.distributions), everyone, cost.shown, f"{cost.delta:g}"]
            shown.append([population, *begin, *end])
    if shown:
        console.table(("population", *HEADER), shown, right=("rounds", "released", "devices", "epsilon", "delta"))
    else:
        console.note("no private round has begun" if device is None else f"{device} was selected for no private round")
    whom = "for a device that was selected for all of them" if device is None else f"for {device}"
    for population, cost in found.items():
        console.sentence(f"{population}: {cost.sentence}, {whom}")
    for population, why in blocked.items():
        name = population or "populations that were not settled since"
        console.note(f"{name}: private rounds are blocked, because {why}; thinwire privacy ledger settle POPULATION")


def run_text(spending: Spending) -> str:
    """Return what a run spent as a sentence with its noise, and what its clients have spent in all runs."""
    from thinwire.reports.privacy import spent_text

    said = spent_text(spending)
    if spending.noise_to_sensitivity is not None:
        said += (
            f"; the noise is {spending.noise_to_sensitivity:.3g} times the sensitivity of {spending.sensitivity:.1f} "
            "grid steps"
        )
    return said


def own_document(ledger: DeviceLedger, name: str, delta: float) -> dict[str, Any]:
    """Return a device's own ledger as JSON, with what its figures mean and assume."""
    costs = _own_costs(ledger, delta).items()
    groups = [{"name": key[0], "data": key[1], **asdict(cost), "meaning": cost.meaning} for key, cost in costs]
    entries = [asdict(one) | {"release": _release(one.release)} for one in ledger.bookings]
    about = {"about_delta": OWN_DELTA, "assumptions": list(OWN_ASSUMPTIONS), "trust": list(OWN_TRUST)}
    found = {"device": name, "damage": ledger.damage, "head": ledger.head, "datasets": groups, "entries": entries}
    return found | about


def show_own(ledger: DeviceLedger, name: str, delta: float) -> None:
    """Print a device's own ledger: a row for each data set, population and run, what each data set has spent in all of
    them, and what that means and assumes.
    """
    keys = dict.fromkeys((one.name or one.data, one.population, one.run) for one in ledger.bookings)
    rows = []
    for key in keys:
        mine = [one for one in ledger.bookings if (one.name or one.data, one.population, one.run) == key]
        cost = Cost.of(Counter(one.release for one in mine), delta)
        rows.append([*key, len(mine), ", ".join(cost.distributions), cost.shown, f"{delta:g}"])
    if rows:
        header = ("data set", "population", "run", "releases", "noise", "epsilon", "delta")
        console.table(header, rows, right=("releases", "epsilon", "delta"))
        for (called, data), cost in _own_costs(ledger, delta).items():
            console.sentence(f"{called or data}: {cost.sentence}, in all populations and runs together")
            console.sentence(UNITS[cost.unit], begin=f"{'unit':<9}")
            console.sentence(cost.meaning, begin=f"{'meaning':<9}")
        console.sentence(OWN_DELTA, begin=f"{'delta':<9}")
        for label, sentences in (("assumes", OWN_ASSUMPTIONS), ("trusted", OWN_TRUST)):
            for one in sentences:
                console.sentence(one, begin=f"{label:<9}")
    if ledger.damage:
        console.note(f"{name} takes part in nothing private: {ledger.damage}")
    elif not rows:
        console.note(f"{name} has taken part in no private round")


def _own_costs(ledger: DeviceLedger, delta: float) -> dict[tuple[str, str], Cost]:
    """Return the cost by data set, with the lines under other names or paths that count for it too."""
    found = dict[tuple[str, str], Cost]()
    for dataset in dict.fromkeys(one.dataset for one in ledger.bookings):
        same = ledger.same_datasets(dataset)
        spent = Counter(one.release for one in ledger.bookings if one.dataset in same)
        found[dataset.name, dataset.data] = Cost.of(spent, delta)
    return found
