"""Reads of the store for the API about runs, rounds and updates, and for a run's page.

Invariant: what a read of a run's page costs does not depend on the number of rounds. A round's explanation and the sums
until its end are stored in its row; curves have a bounded number of points; an index finds what changed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from thinwire.core.errors import NotFound
from thinwire.core.formatting import with_home
from thinwire.core.layout import Layout
from thinwire.core.plan_text import origins
from thinwire.core.run_events import is_sampled
from thinwire.reports import secure_rounds
from thinwire.reports.alerting import divergence
from thinwire.reports.comparison import POINTS
from thinwire.reports.privacy_history import PrivacyState, SpendingHistory
from thinwire.reports.reason_text import behind, deadline_sentence, sentence
from thinwire.store import START_RUN, PointRow, RoundRow, RunRow, Store, UpdateRow
from thinwire.store.explaining import explain_run, totals_of
from thinwire.store.round_explanation import RoundExplanation, stored
from thinwire.store.round_timing import clock_was_set, downtime_of, open_text, phases_of, stretches, turns
from thinwire.web import round_schemas, schemas
from thinwire.web.client_queries import AT_WORK, Clients, ShownKey
from thinwire.web.run_text import buffered, closing, not_evaluated, open_round, overlaps, run_sentence

Shown = TypeVar("Shown", bound=schemas.Run)

SHOWN_ROUNDS: Final = 60  # newest rounds of a page
MAX_CHANGED: Final = 2 * SHOWN_ROUNDS  # rounds; where more have changed, everything is read
MAX_ROUNDS: Final = 1000  # of one answer
MAX_UPDATES: Final = 5000  # of one answer: they take 3 s and 40 MB
ROUNDS_READ: Final = 50  # at once for such an answer
WORST: Final = 5  # slowest rounds of a page
EARLIER_ROUNDS: Final = 20  # rounds in which earlier assignments are searched
LATEST_ROUNDS: Final = 3  # rounds in which the latest version with metrics is searched
KEPT_RUNS: Final = 8


class Reader:
    """Reads all that the API tells of runs. `home` is the `--home` option for commands in recorded sentences."""

    def __init__(self, store: Store, home: str = "") -> None:
        self._store, self._home, self._clients = store, home, Clients(store)
        self._kept: dict[str, SpendingHistory] = {}
        self._following = threading.Lock()

    def runs(self, first: int = 0, count: int | None = None) -> list[schemas.Run]:
        """Return `count` runs from the place `first` on, newest first and without archived ones; without `count` all.

        A running one has its open round in its sentence.
        """
        rows, queue = [row for row in self._store.runs() if row.archived_at is None], self._store.run_queue()
        end = None if count is None else first + count
        return [self._run(schemas.Run, row, self._open_rounds(row), queue) for row in rows[first:end]]

    def sentences(self, rows: Sequence[RunRow]) -> list[str]:
        """Return the status of each of these runs in a sentence."""
        queue = self._store.run_queue() if any(row.status == "queued" for row in rows) else ()
        return [self._sentence(row, self._open_rounds(row), queue) for row in rows]

    def run(self, name: str) -> schemas.RunPage:
        """Return one run with its plan, its clients and its time breakdown.

        `name` is an id, a unique beginning of one, or "latest".
        """
        row = self._store.run(name)
        clients = self._clients.page(row).clients
        return schemas.RunPage(**dict(self._now(row)), **self._about(row), first_plan=row.first_plan, clients=clients)

    def view(
        self, name: str, since: int = 0, number: int = 0, held: int = 0, first_client: int | None = None,
        sort: ShownKey = "device", descending: bool = False,
    ) -> round_schemas.RunView:  # fmt: skip
        """Return what a run's page shows, or what has changed of it since the view with the change `since`.

        `number` is the chosen round, 0 for the one that takes replies. Of the round `held` the browser has what it was
        at `since`. Without `first_client` the view has no clients, else a page of them by `sort`. In a run with Poisson
        sampling every view is whole: the number of changes would tell how many clients were sampled.
        """
        store, row = self._store, self._store.run(name)
        opened, newest = store.round_count(row.run_id)
        change = 0 if is_sampled(row.plan) else newest
        since = min(since, change)
        changed = store.rounds(row.run_id, changed_after=since, limit=MAX_CHANGED + 1) if since else []
        whole = not since or len(changed) > MAX_CHANGED
        rounds = store.rounds(row.run_id, opened - SHOWN_ROUNDS + 1) if whole else changed
        spent = self._spent(row)
        number = min(number or self._current(row, opened), opened)
        return round_schemas.RunView(
            change=change, whole=whole, opened=opened, run=self._now(row), about=self._about(row) if whole else None,
            rounds=[_summary(one, row, spent) for one in rounds],
            points=list(map(_point, store.points(row.run_id, POINTS) if whole else ())),
            spent=_spent_points(spent) if whole else [],
            round=self._round_page(row, number, 0 if whole or held != number else since, newest) if number else None,
            clients=None if first_client is None else self._clients.page(row, first_client, CLIENTS, sort, descending),
            worst=self._worst(row) if whole or any(one.reason for one in changed) else None,
        )  # fmt: skip

    def round_summaries(self, name: str, first: int, last: int) -> list[round_schemas.RoundSummary]:
        """Return the rounds from `first` to `last` as rows of a table, at most `MAX_CHANGED` of them."""
        row = self._store.run(name)
        spent = self._spent(row)
        last = min(last, first + MAX_CHANGED - 1)
        return [_summary(one, row, spent) for one in self._store.rounds(row.run_id, first, last)]

    def rounds(self, name: str, first: int = 1) -> tuple[list[round_schemas.Round], int]:
        """Return at most `MAX_ROUNDS` rounds from `first` on, with sums since the start, and the next one or 0."""
        row, last = self._store.run(name), first + MAX_ROUNDS - 1
        spent, (opened, _) = self._spent(row), self._store.round_count(row.run_id)
        found = [_round(one, row, spent) for one in self._store.rounds(row.run_id, first, last)]
        return found, last + 1 if last < opened else 0

    def round(self, name: str, number: int, since: int = 0) -> round_schemas.RoundPage:
        """Return one round with its assignments; `NotFound` if the run has not opened it.

        With `since` the result has only the assignments that changed after this change, unless the times of all do.
        """
        row = self._store.run(name)
        opened, newest = self._store.round_count(row.run_id)
        if number > opened:
            raise NotFound(f"{row.run_id} has no round {number}", why=f"it has opened {opened}")
        return self._round_page(row, number, since, newest)

    def _round_page(self, row: RunRow, number: int, since: int, change: int) -> round_schemas.RoundPage:
        store = self._store
        rounds = store.rounds(row.run_id, number - 1, number)
        found = rounds[-1]
        since = 0 if found.downtimes or overlaps(row) else since
        own, hidden = store.updates(row.run_id, number, changed_after=since), secure_rounds.why_not_known(row)
        before = self._earlier(row, found, own if not since else ())
        turn_at = turns(rounds, store.current_round(row.run_id) if overlaps(row) else None)[number]
        closed = store.phases(row.run_id, number) if secure_rounds.is_secure(row) else None
        phases = [] if closed is None else phases_of(found, closed, store.updates(row.run_id, number))
        if found.reason:
            took = stored(number, found.seconds, found.explanation)
        elif phases:
            took = RoundExplanation(number, 0.0, open_text(found, phases))
        else:
            all_own = store.updates(row.run_id, number) if since and buffered(row) else own
            ahead = store.open_rounds(row.run_id, number - EARLIER_ROUNDS, number - 1)
            said = open_round(found, all_own, before, buffered(row), ahead, taken=turn_at is not None)
            took = RoundExplanation(number, 0.0, said)
        of = {one.round: one for one in (*store.rounds_of(row.run_id, {one.round for one in before}), found)}
        shown = _round(found, row, self._spent(row)).model_copy(update={"slowest": took.device})
        return round_schemas.RoundPage(
            **{**dict(shown), **_time_breakdown(took)}, now=time.time(), waited_for=list(took.waited_for),
            whole=not since, change=0 if is_sampled(row.plan) else max([change, *(one.changed for one in own)]),
            deadline_reason=deadline_sentence(found.deadline_s, found.deadline_reason), sampling=found.sampling,
            turn_at=turn_at,
            missed_s=max(found.missed_s, downtime_of(found)),
            codecs=Counter(found.codecs.values()).most_common(),
            phases=[round_schemas.Phase.model_validate(one) for one in phases],
            updates=[update(one, of.get(one.round), turn_at, hidden) for one in own],
            late_aggregated=[update(one, of.get(one.round), turn_at, hidden) for one in before],
            downtimes=_downtimes(found, found.opened_at if turn_at is None else turn_at),
        )  # fmt: skip

    def updates(self, name: str, number: int | None, first: int = 1) -> tuple[list[round_schemas.Update], int]:
        """Return the assignments of one round, or a page of those of the run, and the round of the next page or 0.

        A page has whole rounds from `first` on: as many as have `MAX_UPDATES` assignments together, and one at least.
        """
        row, store = self._store.run(name), self._store
        hidden = secure_rounds.why_not_known(row)
        opened, at = store.round_count(row.run_id)[0], first
        found = store.updates(row.run_id, number) if number else []
        step = max(1, min(ROUNDS_READ, MAX_UPDATES // max(1, int(row.totals.get("most") or 1))))
        while not number and at <= opened and len(found) <= MAX_UPDATES:
            found += store.updates(row.run_id, at, at + step - 1)
            at += step
        if not number and len(found) > MAX_UPDATES:
            at = max(found[0].round + 1, found[MAX_UPDATES].round)  # the round that does not fit begins the next page
            found = [one for one in found if one.round < at]
        of = {one.round: one for one in store.rounds(row.run_id, number or first, number or at - 1)} if found else {}
        told = [update(one, of.get(one.round), hidden=hidden) for one in found]
        return told, at if not number and at <= opened else 0

    def clients(
        self, name: str, first: int = 0, count: int | None = None, sort: ShownKey = "device", descending: bool = False
    ) -> schemas.Clients:  # fmt: skip
        """Return the clients of a run in this order, `count` of them from the place `first` on."""
        return self._clients.page(self._store.run(name), first, count, sort, descending)

    def heat(self, name: str, first: int, last: int) -> round_schemas.Heat:
        """Return rounds by clients, of the newest rounds from `first` to `last`."""
        return self._clients.heat(self._store.run(name), first, last)

    def _worst(self, row: RunRow) -> list[round_schemas.WorstRound]:
        """Return the slowest rounds; none of a run with Poisson sampling, where their order may follow the samples."""
        found = [] if is_sampled(row.plan) else self._store.slowest_rounds(row.run_id, WORST)
        return [
            round_schemas.WorstRound(
                round=one.round, seconds=one.seconds, slowest=one.device, waited_for=list(one.waited_for[:NAMED]),
                waited_count=len(one.waited_for),
            )
            for one in found
        ]  # fmt: skip

    def _now(self, row: RunRow) -> schemas.RunNow:
        """Return a run as it is now, without its plan."""
        seq, open_rounds = self._store.changes(), self._open_rounds(row)
        sizes = [size for size in (row.totals.get("fewest"), row.totals.get("most")) if size is not None]
        protection = secure_rounds.protection(row, [*sizes, *(len(one.selected) for one in open_rounds)])
        spent, totals = self._spent(row), totals_of(self._store, row)
        secure = secure_rounds.is_secure(row)
        latest = self._store.rounds(row.run_id, row.rounds_closed + 1 - LATEST_ROUNDS) if secure else []
        warning = divergence(self._store, row)
        return self._run(
            schemas.RunNow, row, open_rounds, self._store.run_queue() if row.status == "queued" else (),
            model_digest=row.model_digest, seconds=totals.seconds,
            notes=[with_home(sentence(note), self._home) for note in row.notes], seq=seq,
            extended=row.is_extended,
            protection=protection and schemas.Protection.model_validate(protection),
            privacy=spent and schemas.Privacy.model_validate(spent[0]),
            not_evaluated=not_evaluated(row, latest), now=time.time(), warning=warning,
            **_time_breakdown(explain_run(totals) if totals.rounds else None),
        )  # fmt: skip

    def _run(
        self, kind: type[Shown], row: RunRow, open_rounds: Sequence[RoundRow], queue: Sequence[RunRow], **more: Any
    ) -> Shown:  # fmt: skip
        """Return a run as the schema `kind`, with its sentence."""
        values = {name: getattr(row, name) for name in schemas.Run.model_fields if name != "sentence"}
        values["status_text"] = with_home(row.status_text, self._home)
        return kind(**values, sentence=self._sentence(row, open_rounds, queue), **more)

    def _sentence(self, row: RunRow, open_rounds: Sequence[RoundRow], queue: Sequence[RunRow]) -> str:
        return with_home(run_sentence(row, next(iter(open_rounds), None), behind(row, queue)), self._home)

    def _about(self, row: RunRow) -> dict[str, Any]:
        """Return the facts of a run that only more rounds change."""
        digest, version = Layout.from_json(row.layout).digest, row.task_report.version
        estimate = self._store.commands.args_of(START_RUN, row.run_id).get("estimate")
        return {
            "plan": row.plan, "origins": origins(row.plan), "layout_digest": digest, "task_version": version,
            "estimate": estimate,
        }  # fmt: skip

    def _current(self, row: RunRow, opened: int) -> int:
        """Return the first open round, or the last one; 0 if there is none."""
        waiting = self._store.open_rounds(row.run_id, opened - EARLIER_ROUNDS, opened)
        return waiting[0] if waiting else opened

    def _open_rounds(self, row: RunRow) -> list[RoundRow]:
        """Return the open rounds of a running run, oldest first."""
        newest = self._store.rounds(row.run_id, row.rounds_closed + 1) if row.status == "running" else []
        return [found for found in newest if not found.reason]

    def _spent(self, row: RunRow) -> Spent:
        """Return what a private run has spent until now, in all and by round; None for other runs."""
        with self._following:
            history = self._kept.pop(row.run_id, None) or SpendingHistory(self._store)
            if (found := history.follow(row)) is None:
                return None
            self._kept[row.run_id] = history
            for oldest in list(self._kept)[:-KEPT_RUNS]:
                del self._kept[oldest]
            return found, history.by_round

    def _earlier(self, row: RunRow, found: RoundRow, own: Sequence[UpdateRow]) -> list[UpdateRow]:
        """Return the assignments of earlier rounds that were aggregated into this one, the newest round first.

        For an open buffered round the result includes those that may still be aggregated into it.
        """
        waits = not found.reason and buffered(row)
        if own and not waits and {*found.aggregated} <= {one.update_id for one in own}:
            return []
        since = found.round - EARLIER_ROUNDS
        return self._store.updates_into(row.run_id, found.round, since, AT_WORK if waits else ())


Spent = tuple[PrivacyState, Mapping[int, tuple[float | None, float | None]]] | None
CLIENTS: Final = 50  # of a page
NAMED: Final = 2  # devices that a slow round names


def update(
    row: UpdateRow, selected: RoundRow | None, opened_at: float | None = None, hidden: str = ""
) -> round_schemas.Update:
    """Return an assignment of the round `selected`, with its stages in seconds since `opened_at`.

    The default of `opened_at` is the opening of its own round. `hidden` says why the client's facts are not known.
    """
    if opened_at is None:
        opened_at = selected.opened_at if selected else row.assigned_at or 0.0
    downtimes = selected.downtimes if selected else ()
    known = selected is None or not clock_was_set(selected)  # else times before and after it share no axis
    drawn = [
        {"stage": one.stage, "begin_s": round(one.begin_s - opened_at, 4), "end_s": round(one.end_s - opened_at, 4)}
        for one in (stretches(row, downtimes) if known else [])
        if one.stage != "downtime"  # drawn once, behind all devices
    ]
    codec = selected.codecs.get(row.device, selected.codec) if selected else ""
    reason = sentence(selected.codec_reasons.get(row.device, ())) if selected else ""
    more = {"not_known": hidden, "codec": codec, "codec_reason": reason, "stretches": drawn}
    return round_schemas.Update(**vars(row), **more)


def _time_breakdown(took: RoundExplanation | None) -> dict[str, Any]:
    """Return the fields of `schemas.TimeBreakdown`."""
    took = took or RoundExplanation(0, 0.0, "")
    return {
        "why": took.sentence, "stages": dict(took.stages), "uncounted": dict(took.uncounted), "requests": took.requests,
        "rtt_s": took.rtt_s, "trips_s": took.trips_s,
    }  # fmt: skip


def _downtimes(found: RoundRow, begin: float) -> list[round_schemas.Downtime]:
    """Return the times without an aggregator, in seconds since `begin`; none if the wall clock was set."""
    return (
        []
        if clock_was_set(found)
        else [
            round_schemas.Downtime(begin_s=max(0.0, since - begin), end_s=until - begin)
            for since, until in found.downtimes
            if until > begin
        ]
    )


def _sums(row: RoundRow, run: RunRow) -> dict[str, Any]:
    """Return the sums from the run's start until this round's end, or until now while it is open."""
    wires = [wire for wire in (run.wire_up, run.wire_down) if wire is not None]
    open_sums = run.totals.get("seconds", 0.0), run.payload_up + run.payload_down, sum(wires) if wires else None
    sums = open_sums if row.until_s is None else (row.until_s, row.until_payload, row.until_wire)
    return dict(zip(("until_s", "until_payload", "until_wire"), sums, strict=True))


def _epsilons(number: int, spent: Spent) -> dict[str, float | None]:
    """Return what a private run had spent after this round."""
    epsilon_run, epsilon = spent[1].get(number, (None, None)) if spent else (None, None)
    return {"epsilon_run": epsilon_run, "epsilon": epsilon}


def _least(row: RoundRow, run: RunRow) -> int:
    """Return the fewest clients in a sum under masks, 0 without secure aggregation."""
    found = secure_rounds.protection(run, [len(row.selected)])
    return found.min_survivors if found else 0


def _round(row: RoundRow, run: RunRow, spent: Spent) -> round_schemas.Round:
    """Return a round with its explanation; the sums include all rounds before."""
    least = _least(row, run)
    said = {"closing": closing(row, least), "why": row.explanation.get("sentence", "")}
    until, more = _sums(row, run), {**_epsilons(row.round, spent), **said}
    more["min_updates"] = max(row.min_updates, least)
    return round_schemas.Round.model_validate(replace(row, **until)).model_copy(update=more)


def _summary(row: RoundRow, run: RunRow, spent: Spent) -> round_schemas.RoundSummary:
    """Return a round as a row of a table."""
    own = {**vars(row), **_sums(row, run), **_epsilons(row.round, spent), **_drawn(row), "selected": len(row.selected)}
    return round_schemas.RoundSummary(**own, closing=closing(row, _least(row, run)))


def _point(row: PointRow) -> round_schemas.CurvePoint:
    """Return a point of the run's curves, in seven significant figures: the dashboard rounds them to fewer."""
    return round_schemas.CurvePoint(
        round=row.round, until_s=None if row.until_s is None else _short(row.until_s), until_payload=row.until_payload,
        clipped=row.clipped, **_drawn(row),
    )  # fmt: skip


def _drawn(row: RoundRow | PointRow) -> dict[str, Any]:
    """Return the evaluation of a round, in seven significant figures."""
    return {
        "metrics": {name: _short(value) for name, value in _curves(row).items()},
        "spread": {name: list(map(_short, ends)) for name, ends in row.spread.items()},
    }


def _curves(row: RoundRow | PointRow) -> dict[str, float]:
    """Return the metrics of an evaluated round, and behind them those of the training that led to it."""
    trained = {f"train/{name}": value for name, value in row.train_metrics.items()}
    return {**row.metrics, **trained} if row.metrics else {}


def _short(value: float) -> float:
    return float(f"{value:.7g}")  # more than are shown, so that a second rounding changes nothing


def _spent_points(spent: Spent) -> list[round_schemas.SpentPoint]:
    """Return what a private run had spent after its rounds: after every one, or every 2nd, 4th, 8th and the last."""
    numbers = sorted(spent[1]) if spent else []
    step = 1
    while len(numbers) / step > POINTS:
        step *= 2
    kept = [*numbers[step - 1 : -1 : step], *numbers[-1:]]
    return [round_schemas.SpentPoint(round=number, **_epsilons(number, spent)) for number in kept]
