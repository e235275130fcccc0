"""What a run came to, told from its journal: what must be the same whatever died, and what was lost or doubled.

"The same" means: same order of accepted heads and deadline ticks, so same model and replica at every version, same
aggregated sets and same outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thinwire.core.events import Event, ModelStored, ReplicaStored, RoundClosed, UpdateAccepted, UpdateDropped

WRONG = ("duplicate", "bad-payload")  # why answers are dropped that a run without a fault has none of
UNTICKED = ("all", "enough")  # nobody was outstanding any more: who was lost is told by what was aggregated


def versions(events: Sequence[Event]) -> dict[int, tuple[str, ...]]:
    """version -> the digests of its model, of the optimizer's state, and of its replica."""
    found: dict[int, tuple[str, ...]] = {e.version: (e.digest, e.state) for e in events if isinstance(e, ModelStored)}
    for event in events:
        if isinstance(event, ReplicaStored):
            found[event.version] = (*found[event.version], event.digest)
    return found


def rounds(events: Sequence[Event]) -> list[tuple[object, ...]]:
    """Each round's number, closing reason and version, what it aggregated in its order, and what it gave back."""
    return [
        (e.round, e.reason, e.version, tuple(e.aggregated), tuple(sorted(e.dropped)))
        for e in events
        if isinstance(e, RoundClosed)
    ]


def accepted(events: Sequence[Event]) -> list[tuple[int, str, int]]:
    """(round, update, staleness) in the order of acceptance."""
    return [(e.round, e.update_id, e.staleness) for e in events if isinstance(e, UpdateAccepted)]


def same(events: Sequence[Event]) -> dict[str, object]:
    """All that must not depend on what died."""
    return {"versions": versions(events), "rounds": rounds(events), "accepted": accepted(events)}


def identical_share(events: Sequence[Event], undisturbed: Sequence[Event]) -> float:
    """The share of versions that are the same in both: their bits, and the rounds that led to them with what was
    accepted, aggregated and given back there. Answers that a fault added are left out where they were dropped for it: a
    second one to an assignment, and one whose bytes are not what it says.
    """
    mine, theirs = _by_version(events), _by_version(undisturbed)
    return sum(mine.get(version) == found for version, found in theirs.items()) / len(mine.keys() | theirs.keys())


def _by_version(events: Sequence[Event]) -> dict[int, tuple[object, ...]]:
    wrong = {e.update_id for e in events if isinstance(e, UpdateDropped) and e.reason in WRONG}
    made: dict[int, list[object]] = {version: [digests] for version, digests in versions(events).items()}
    for closed in (e for e in events if isinstance(e, RoundClosed)):
        taken = [one for one in accepted(events) if one[0] == closed.round and one[1] not in wrong]
        given_back = sorted(set(closed.dropped) - wrong)
        ticked = closed.reason if closed.reason not in UNTICKED else ""
        made[closed.version].append((closed.round, ticked, tuple(closed.aggregated), given_back, taken))
    return {version: tuple(found) for version, found in made.items()}


def double_aggregations(events: Sequence[Event]) -> int:
    """Assignments whose answers stand in a step more than once, whatever the answers' ids."""
    by_update = {e.update_id: (e.device, e.assignment_id) for e in events if isinstance(e, UpdateAccepted)}
    aggregated = Counter(by_update[update] for e in events if isinstance(e, RoundClosed) for update in e.aggregated)
    return sum(count - 1 for count in aggregated.values())


def lost_updates(events: Sequence[Event]) -> int:
    """Accepted answers of closed rounds that were neither aggregated nor given back to their sender."""
    settled = {update for e in events if isinstance(e, RoundClosed) for update in (*e.aggregated, *e.dropped)}
    settled |= {e.update_id for e in events if isinstance(e, UpdateDropped)}
    closed = {e.round for e in events if isinstance(e, RoundClosed)}
    return sum(e.update_id not in settled for e in events if isinstance(e, UpdateAccepted) and e.round in closed)
