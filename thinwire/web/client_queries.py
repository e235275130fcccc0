"""Reads of the store for the clients of a run: what each does now, and why one was not selected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from thinwire.core.events import ENDED
from thinwire.reports import secure_rounds
from thinwire.reports.reason_text import sentence
from thinwire.store import ClientRow, RoundRow, RunRow, Store, WorkRow
from thinwire.store.run_list import ClientKey
from thinwire.web import round_schemas, schemas

ShownKey = Literal[ClientKey, "state", "examples", "residual_ratio"]  # what a table of clients is sorted by
LATEST_ROUNDS = 3  # rounds in which a device's examples are searched
HEAT_ROUNDS = 60  # of a heat map at most: as many as the strip of rounds above it shows
HEAT_ROWS = 200  # of a heat map at most: more clients are put together in bins
HEAT_CELLS = 60_000  # assignments that are read for a heat map: with more clients it has fewer rounds
# From best to worst. `over` is first: the run or the round ended before the reply, which no device could help.
OUTCOMES = (
    "over",
    "aggregated",
    "accepted",
    "aggregated-late",
    "selected",
    "dropped",
    "failed",
)


class Clients:
    """Reads the clients of runs, a page of them at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def page(
        self, row: RunRow, first: int = 0, count: int | None = None, sort: ShownKey = "device", descending: bool = False
    ) -> schemas.Clients:  # fmt: skip
        """Return `count` clients of a run from the place `first` on: those that take part in this order, then the
        others by name. A sort by a value of the latest rounds (`BY_LATEST`) has one order for all clients, because no
        table holds that value.
        """
        store = self._store
        taking_part, selected = store.client_count(row.run_id)
        rounds = store.rounds(row.run_id, row.rounds_closed)
        newest = rounds[-1] if rounds else None
        reasons = {} if newest is None or row.status in ENDED else self._reasons(row, newest)
        absent = store.not_in_run(row.run_id, list(reasons))
        end = None if count is None else first + count
        if sort in BY_LATEST:
            every = store.client_names(row.run_id) + absent
            names = sorted_by(every, self._latest(row, newest, sort, reasons, every), descending)[first:end]
            clients = store.clients(row.run_id, devices=None if count is None else names)
            shown_absent = sorted({*absent}.intersection(names))
        else:
            clients = store.clients(row.run_id, first, count, cast(ClientKey, sort), descending)
            shown_absent = absent[max(0, first - taking_part) : None if end is None else max(0, end - taking_part)]
            names = [one.device for one in clients] + shown_absent
        wanted = None if count is None else names
        latest = store.latest_work(row.run_id, _since(newest), wanted)
        shown = client_states(row, newest, latest, clients, store.offline(wanted), reasons, shown_absent)
        by_name = {one.device: one for one in shown}
        return schemas.Clients(
            total=taking_part + len(absent), selected=selected, first=first,
            clients=[by_name[name] for name in names if name in by_name],
        )  # fmt: skip

    def _latest(
        self, row: RunRow, newest: RoundRow | None, sort: ShownKey, reasons: Mapping[str, str],
        names: Sequence[str],
    ) -> Mapping[str, Any]:  # fmt: skip
        """Return what follows from the latest rounds, for each of the clients `names` that has such a value."""
        latest = self._store.latest_work(row.run_id, _since(newest))
        if sort == "examples":
            return {one.device: one.examples for one in latest if one.examples}
        if sort == "residual_ratio":
            return {one.device: one.residual_ratio for one in latest if one.residual_ratio is not None}
        working, offline = at_work(row, newest, latest), self._store.offline()
        return {name: _state(row, working.get(name), name in offline, reasons.get(name)) for name in names}

    def heat(self, row: RunRow, first: int, last: int) -> round_schemas.Heat:
        """Return rounds by clients, of the newest rounds from `first` to `last`, with at most `HEAT_CELLS` cells."""
        last = min(last, self._store.round_count(row.run_id)[0])
        rounds, cells = dict[int, float](), 0
        for one in reversed(self._store.rounds(row.run_id, max(first, last - HEAT_ROUNDS + 1), last)):
            cells += len(one.selected)
            if rounds and cells > HEAT_CELLS:
                break
            rounds[one.round] = one.seconds or one.deadline_s
        numbers = sorted(rounds)
        work = self._store.latest_work(row.run_id, numbers[0], last=last) if numbers else []
        return heat_map(numbers, rounds, work)

    def _reasons(self, run: RunRow, newest: RoundRow) -> dict[str, str]:
        """Return the reason of each device that the latest round considered and did not select.

        The round names no device that was not sampled: these are the others that were online when it opened.
        """
        reasons = {device: sentence(why) for device, why in newest.not_selected.items()}
        if not newest.not_sampled:
            return reasons
        if run.source == "sim":
            others = {*self._store.client_names(run.run_id)}
        else:
            others = {name for name, at in self._store.online_since().items() if at <= newest.opened_at}
        return {**dict.fromkeys(sorted(others.difference(newest.selected)), "not sampled"), **reasons}


AT_WORK: Final = ("selected", "accepted")  # outcomes of an assignment that is not decided yet
BY_LATEST: Final = ("state", "examples", "residual_ratio")


def sorted_by(names: Sequence[str], values: Mapping[str, Any], descending: bool) -> list[str]:
    """Return the names by their values, those without one last in either direction; equal ones stay in their order."""
    known = sorted((name for name in names if name in values), key=values.__getitem__, reverse=descending)
    return known + [name for name in names if name not in values]


def _since(newest: RoundRow | None) -> int:
    """Return the number of the first of the latest rounds."""
    return max(1, newest.round - LATEST_ROUNDS + 1) if newest else 1


def heat_map(numbers: Sequence[int], lengths: Mapping[int, float], work: Sequence[WorkRow]) -> round_schemas.Heat:
    """Return a heat map of these rounds, with their lengths in seconds; a cell of a bin is that of its worst client."""
    names = sorted({one.device for one in work})
    each = max(1, -(-len(names) // HEAT_ROWS))
    row_of = {name: place // each for place, name in enumerate(names)}
    column_of = {number: place for place, number in enumerate(numbers)}
    worst = [[-1] * len(numbers) for _ in range(-(-len(names) // each))]
    shares: list[list[float | None]] = [[None] * len(numbers) for _ in worst]
    for one in work:
        row, column = row_of[one.device], column_of[one.round]
        worst[row][column] = max(worst[row][column], OUTCOMES.index(one.outcome))
        if one.arrived_at is not None and one.assigned_at is not None and lengths[one.round]:
            share = round((one.arrived_at - one.assigned_at) / lengths[one.round], 2)
            shares[row][column] = max(share, shares[row][column] or 0.0)
    bins = [names[place : place + each] for place in range(0, len(names), each)]
    return round_schemas.Heat(
        rounds=list(numbers), outcomes=list(OUTCOMES), clients=len(names),
        rows=[
            round_schemas.HeatRow(
                label=own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}", clients=len(own), shares=of,
                outcomes="".join("." if place < 0 else str(place) for place in places),
            )
            for own, places, of in zip(bins, worst, shares, strict=True)
        ],
    )  # fmt: skip


def client_states(
    run: RunRow,
    newest: RoundRow | None,
    latest: Sequence[WorkRow],
    clients: Sequence[ClientRow],
    offline: Mapping[str, float | None],
    not_selected: Mapping[str, str],
    absent: Sequence[str],
) -> list[schemas.Client]:
    """Return these `clients`, then the `absent` ones, which never had an assignment.

    `latest` are the assignments of the latest rounds, oldest first. A client's state follows from its latest assignment
    and from its device's connection: `offline` has the moment at which each offline device was last heard.
    `not_selected` has the reasons of the latest round.
    """
    working, hidden = at_work(run, newest, latest), secure_rounds.why_not_known(run)
    examples = {one.device: one.examples for one in latest if one.examples}
    ratios = {one.device: one.residual_ratio for one in latest if one.residual_ratio is not None}
    shown = [
        schemas.Client(
            **{name: getattr(row, name) for name in _COUNTS}, examples=examples.get(row.device, 0),
            residual_ratio=ratios.get(row.device), not_known=hidden,
            **_now(run, row.device, offline, working.get(row.device), not_selected.get(row.device)),
        )
        for row in clients
    ]  # fmt: skip
    return shown + [_never_selected(name, run, offline, not_selected) for name in absent]


def at_work(run: RunRow, newest: RoundRow | None, latest: Sequence[WorkRow]) -> dict[str, WorkRow]:
    """Return the open assignment of each client that has one while the latest round is open."""
    if newest is None or newest.reason or run.status in ENDED:
        return {}
    last = newest.round
    # a client that is busy with an earlier round is not selected for the latest one
    working = {one.device: one for one in latest if one.round < last and one.outcome == "selected"}
    return working | {one.device: one for one in latest if one.round == last and one.outcome in AT_WORK}


_COUNTS = (
    "device", "selected", "arrived", "aggregated_count", "late", "dropped", "failed", "last_outcome", "last_at",
    "payload_up", "payload_down", "wire_up", "wire_down",
)  # fmt: skip


def _never_selected(
    name: str, run: RunRow, offline: Mapping[str, float | None], why: Mapping[str, str]
) -> schemas.Client:
    """Return a client that was never selected, with the reason."""
    return schemas.Client(
        device=name, selected=0, arrived=0, aggregated_count=0, late=0, dropped=0, failed=0, examples=0,
        last_outcome="", last_at=None, payload_up=0, payload_down=0, wire_up=None, wire_down=None,
        **_now(run, name, offline, None, why[name]),
    )  # fmt: skip


def _now(
    run: RunRow, name: str, offline: Mapping[str, float | None], assignment: WorkRow | None, not_selected: str | None
) -> dict[str, object]:
    """Return a client's `state` as one word, with `state_text` for reading."""
    state = _state(run, assignment, name in offline, not_selected)
    text, since = state, None
    if state == "offline":
        since = offline[name]
    elif state == "arrived" and assignment is not None:
        text = f"round {assignment.round} is being aggregated"
    elif state == "working" and assignment is not None:
        text, since = f"in round {assignment.round}", assignment.assigned_at
    elif state == "not-selected":
        text = f"not selected: {not_selected}"
    elif run.status in ENDED and run.source == "sim":
        text = "simulated"
    return {"state": state, "state_text": text, "since": since}


def _state(run: RunRow, assignment: WorkRow | None, is_offline: bool, not_selected: str | None) -> str:
    """Return a client's state as one word."""
    if is_offline:
        return "offline"
    if run.status in ENDED:
        return "idle"
    if assignment is not None:
        return "arrived" if assignment.outcome == "accepted" else "working"
    return "not-selected" if not_selected else "idle"
