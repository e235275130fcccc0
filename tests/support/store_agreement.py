"""Whether the tables that are read say what the journal and each other say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.explained import whys
from tests.support.store_story import LAYOUT, PLAN
from thinwire.core.events import Evaluated, Event, UpdateAccepted, UpdateDropped
from thinwire.core.fleet import TaskReport
from thinwire.store import RunRow, Store, UpdateRow
from thinwire.store.explaining import RunTotals
from thinwire.store.read_models import PhaseRow, RoundRow
from thinwire.store.round_timing import turns

TRAFFIC = ("payload_up", "payload_down", "wire_up", "wire_down")


def assert_sums_agree(store: Store, run_id: str, events: Sequence[Event] | None = None) -> None:
    """Every count and sum in runs, rounds and clients is that over the rows of updates.

    A run's bytes have beside them what measuring its last model took, which is no round's. A round's bytes up are of
    the answers that came in it, and of the keys and shares of its own clients. `events` is the run's journal, where
    the caller has read it.
    """
    updates, run, rounds = store.updates(run_id), store.run(run_id), store.rounds(run_id)
    phases = store.phases(run_id)
    whole, came_in = _added(updates), dict[str, int]()
    for event in [event for _, event in store.events(run_id)] if events is None else events:
        if isinstance(event, UpdateAccepted | UpdateDropped):
            came_in.setdefault(event.update_id, event.round)
        if isinstance(event, Evaluated):
            taken = {
                "payload_down": event.payload_bytes,
                "wire_down": event.sent_bytes,
                "wire_up": event.received_bytes,
            }
            whole |= {name: (whole[name] or 0) + amount for name, amount in taken.items() if amount}
    assert _kept(run) == whole
    keys = Counter[tuple[int, str]]()  # of a secure round: the bytes of a device's messages beside its update
    for phase in phases:
        if phase.phase != "masked":
            keys.update({(phase.round, device): sent for device, sent in phase.received.items()})
    for row in rounds:
        came_now = [u for u in updates if came_in.get(u.update_id) == row.round]
        came, own = _added(came_now), _added([u for u in updates if u.round == row.round])
        late_keys = sum(keys[u.round, u.device] for u in came_now)
        sent = sum(count for (number, _), count in keys.items() if number == row.round)
        up = {"payload_up": (came["payload_up"] or 0) - late_keys + sent, "wire_up": came["wire_up"]}
        assert _kept(row) == own | up
    for client in store.clients(run_id):
        mine = [u for u in updates if u.device == client.device]
        assert _kept(client) == _added(mine)
        assert (client.selected, client.arrived) == (len(mine), sum(bool(u.update_id) for u in mine))
    _explanations_agree(store, run, rounds, updates, phases)


def assert_explanations_agree(store: Store, run_id: str) -> None:
    """What `assert_sums_agree` says of explanations."""
    run, rounds = store.run(run_id), store.rounds(run_id)
    _explanations_agree(store, run, rounds, store.updates(run_id), store.phases(run_id))


def _explanations_agree(
    store: Store, run: RunRow, rounds: Sequence[RoundRow], updates: Sequence[UpdateRow], phases: Sequence[PhaseRow]
) -> None:
    """The stored explanation of each closed round is the one of its rows as they are, and the sums are over all rounds.

    Links that were measured after a round closed are not in its explanation; so a store with some is not compared.
    """
    found, until = store.explanations(run.run_id), (0.0, 0, 0)
    if run.source == "sim" or not store.measures("rtt"):
        assert found == whys(run, rounds, updates, turns(rounds), phases=phases)
    totals = RunTotals()
    for one in found:
        totals.add(one)
    slowest, silent = store.most_waited_for(run.run_id)
    assert sum(slowest.values()) == max(totals.slowest.values(), default=0)
    assert sum(silent.values()) == max(totals.missed.values(), default=0)
    kept = RunTotals.from_json(run.totals)
    assert (kept.rounds, kept.requests, kept.timed) == (totals.rounds, totals.requests, totals.timed)
    assert math.isclose(kept.seconds, totals.seconds, abs_tol=1e-6)
    for name in kept.stages.keys() | totals.stages.keys():
        assert math.isclose(kept.stages[name], totals.stages[name], rel_tol=1e-6, abs_tol=1e-6)
    for row in rounds:
        if row.until_s is None:
            assert not row.reason
            continue
        wires = (row.wire_up or 0) + (row.wire_down or 0)
        until = until[0] + (row.seconds or 0.0), until[1] + row.payload_up + row.payload_down, until[2] + wires
        assert math.isclose(row.until_s, until[0], abs_tol=1e-6)
        assert (row.until_payload, row.until_wire or 0) == until[1:]


@functools.cache
def empty_database() -> bytes:
    """A database with its tables, made once: making them takes longer than most tests."""
    with tempfile.TemporaryDirectory() as folder:
        Store.open(Path(folder) / "empty").close()
        return (Path(folder) / "empty").read_bytes()


@contextlib.contextmanager
def empty_store() -> Iterator[Store]:
    """A store that is gone afterwards; for tests that need many."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite3"
        path.write_bytes(empty_database())
        with Store.open(path) as store:
            yield store


def assert_is_replayed(store: Store, run_id: str) -> None:
    """The journal, recorded again one event at a time in an empty store, makes the same tables."""
    with empty_store() as again:
        row = store.run(run_id)
        same = again.create_run(row.task, PLAN, LAYOUT, TaskReport(row.task, codecs=("int8",)), source=row.source)
        assert same == run_id
        for _, event in store.events(run_id):
            again.record(run_id, [event])
        assert shown(again, run_id) == shown(store, run_id)


def shown(store: Store, run_id: str) -> dict[str, Any]:
    run = dataclasses.replace(store.run(run_id), created_at=0.0, identity="")  # neither is in the journal
    return {
        "run": run,
        "rounds": [dataclasses.replace(row, explanation={}) for row in store.rounds(run_id)],  # it has measured links
        "phases": store.phases(run_id),
        "updates": store.updates(run_id),
        "clients": store.clients(run_id),
        "models": store.models(run_id),
    }


def _kept(row: Any) -> dict[str, int | None]:
    names = (*TRAFFIC, "aggregated_count", "late", "dropped", "failed")
    return {name: getattr(row, name) for name in names}


def _added(updates: Iterable[UpdateRow]) -> dict[str, int | None]:
    rows = list(updates)
    outcomes = Counter(u.outcome for u in rows)
    sums: dict[str, int | None] = {"aggregated_count": outcomes["aggregated"], "late": outcomes["aggregated-late"]}
    sums |= {name: outcomes[name] for name in ("dropped", "failed")}
    for name in TRAFFIC:
        seen = [getattr(u, name) for u in rows if getattr(u, name) is not None]
        sums[name] = sum(seen) if seen or name.startswith("payload") else None
    return sums
