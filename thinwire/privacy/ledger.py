"""The privacy ledger's arithmetic: epsilon of the releases that a ledger holds, as the JSON text of each and its count.

Two ledgers hold such texts: the aggregator's (store/privacy_ledger.py), by population, and each device's own
(client/privacy_ledger.py), by data set. Neither imports this module's numbers; they only count texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from thinwire.core.errors import DataLost
from thinwire.privacy.accounting import Release, epsilon


def releases_of(spent: Mapping[str, int]) -> dict[Release, int]:
    """Return the counts by release; raise `DataLost` for a text that is no release, because its cost is not known."""
    found = Counter[Release]()
    for text, count in spent.items():
        try:
            found[Release.from_json(text)] += count
        except (ValueError, TypeError) as error:
            raise DataLost(
                "a release in the privacy ledger is not readable",
                why=str(error),
                hint="install the version of thinwire that wrote it",
            ) from error
    return dict(found)


def epsilon_of(spent: Mapping[str, int], delta: float) -> float:
    """Return the epsilon at `delta` of all these releases together; 0 if there is none.

    >>> epsilon_of({}, 1e-5)
    0.0
    """
    releases = {release: count for release, count in releases_of(spent).items() if count}
    return epsilon(releases, delta) if releases else 0.0


def costliest(kinds: Iterable[str], spent: Mapping[str, int], count: int, delta: float) -> str:
    """Return the release of which `count` more would cost the most behind what is `spent`; "" if there is no kind."""
    more = {kind: epsilon_of(Counter(spent) + Counter({kind: count}), delta) for kind in sorted(set(kinds))}
    return max(more, key=lambda kind: more[kind], default="")
