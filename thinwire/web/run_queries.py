"""Reads of the store for the API about runs, rounds, clients and updates.

Open tabs repeat the same reads after each event. Therefore `RunHistory` keeps a run's sums and explanations, and reads
only the rounds that changed. Invariant: what an event costs does not depend on the number of the run's rounds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.core.errors import NotFound
from thinwire.core.events import ENDED
from thinwire.core.formatting import with_home
from thinwire.core.layout import Layout
from thinwire.reports import secure_rounds
from thinwire.reports.privacy_history import PrivacyState, SpendingHistory
from thinwire.reports.reason_text import behind, deadline_sentence, sentence
from thinwire.reports.round_explanation import RoundExplanation, RunTotals, why, whys
from thinwire.reports.round_timing import clock_was_set, down_s, round_trips, stretches, turn_at, turns
from thinwire.store import ClientRow, DeviceInfo, RoundRow, RunRow, Store, UpdateRow
from thinwire.web import schemas
from thinwire.web.run_text import buffered, closing, not_evaluated, open_round, overlaps, run_sentence

Shown = TypeVar("Shown", bound=schemas.Run)

LATEST_ROUNDS = 3  # rounds in which a device's examples are searched
KEPT_RUNS = 8


class Reader:
    """All queries about runs. `home` is the `--home` option for commands in recorded sentences."""

    def __init__(self, store: Store, home: str = "") -> None:
        self._store, self._home = store, home
        self._kept: dict[str, RunHistory] = {}
        self._following = threading.Lock()

    def runs(self) -> list[schemas.Run]:
        """Return all runs, newest first; a running one has the state of its open round in its sentence."""
        rows, line = self._store.runs(), self._store.line()
        return [_run(schemas.Run, row, self._open_round(row), line, self._home) for row in rows]

    def run(self, name: str) -> schemas.RunPage:
        """Return one run with its clients and its time breakdown.

        `name` is an id, a unique beginning of one, or "latest".
        """
        store = self._store
        seq, row = store.changes(), store.run(name)
        rounds = store.rounds(row.run_id, row.rounds_closed + 1 - LATEST_ROUNDS)
        latest = [store.updates(row.run_id, found.round) for found in rounds[: -LATEST_ROUNDS - 1 : -1]]
        newest = rounds[-1] if rounds else None
        clients = client_states(row, newest, latest, store.clients(row.run_id), store.devices())
        history = self._history(row)
        protection = secure_rounds.protection(row, history.selected)
        return _run(
            schemas.RunPage, row, self._open_round(row), store.line() if row.status == "queued" else (), self._home,
            plan=row.plan, model_digest=row.model_digest, layout_digest=Layout.from_json(row.layout).digest,
            task_version=row.task_report.version, seconds=history.until(history.opened).seconds,
            notes=[with_home(sentence(note), self._home) for note in row.notes], clients=clients, seq=seq,
            protection=protection and schemas.Protection.model_validate(protection),
            privacy=history.privacy and schemas.Privacy.model_validate(history.privacy),
            not_evaluated=not_evaluated(row, rounds), now=time.time(),
            **_went(history.totals.explanation() if history.totals.rounds else None),
        )  # fmt: skip

    def rounds(self, name: str, first: int = 1) -> list[schemas.Round]:
        """Return the run's rounds from `first` on, with sums since the run's start."""
        row = self._store.run(name)
        rounds = self._store.rounds(row.run_id, first)
        history = self._history(row)
        return [_round(one, history) for one in rounds]

    def round(self, name: str, number: int) -> schemas.RoundPage:
        """Return one round with its assignments; `NotFound` if the run has not opened it."""
        row = self._store.run(name)
        rounds = self._store.rounds(row.run_id, number - EARLIER_ROUNDS, number)
        history = self._history(row)
        if not rounds or rounds[-1].round != number:
            raise NotFound(f"{row.run_id} has no round {number}", why=f"it has opened {history.opened}")
        found = rounds[-1]
        own, hidden = self._store.updates(row.run_id, number), secure_rounds.why_not_known(row)
        before = earlier(row, found, own, lambda one: self._store.updates(row.run_id, one))
        turn_at = turns(rounds, self._store.current_round(row.run_id) if overlaps(row) else None)[number]
        ahead = [one.round for one in rounds if not one.reason and one.round < number]
        closed = self._store.phases(row.run_id, number) if secure_rounds.is_secure(row) else None
        phases = [] if closed is None else secure_rounds.phases_of(found, closed, own)
        if found.reason:
            simulated = row.source == "sim"
            took = why(found, own, before, turn_at, simulated=simulated, rtts=rtts(self._store, row), phases=closed)
        elif phases:
            took = RoundExplanation(number, 0.0, secure_rounds.open_text(found, phases))
        else:
            said = open_round(found, own, before, buffered(row), ahead, taken=turn_at is not None)
            took = RoundExplanation(number, 0.0, said)
        shown = _round(found, history).model_copy(update={"slowest": took.device})
        of = {one.round: one for one in rounds}
        return schemas.RoundPage(
            **{**dict(shown), **_went(took)}, now=time.time(), waited_for=list(took.waited_for),
            deadline_reason=deadline_sentence(found.deadline_s, found.deadline_reason), sampling=found.sampling,
            turn_at=turn_at,
            missed_s=max(found.missed_s, down_s(found)),
            codecs=Counter(found.codecs.values()).most_common(),
            phases=[schemas.Phase.model_validate(one) for one in phases],
            updates=[update(one, of.get(one.round), turn_at, hidden) for one in own],
            late_aggregated=[update(one, of.get(one.round), turn_at, hidden) for one in before],
            downtimes=_downtimes(found, found.opened_at if turn_at is None else turn_at),
        )  # fmt: skip

    def updates(self, name: str, number: int | None) -> list[schemas.Update]:
        """Return every assignment of the run, or of one round."""
        row = self._store.run(name)
        hidden = secure_rounds.why_not_known(row)
        of = {found.round: found for found in self._store.rounds(row.run_id, number or 1, number)}
        return [update(one, of.get(one.round), hidden=hidden) for one in self._store.updates(row.run_id, number)]

    def _history(self, row: RunRow) -> RunHistory:
        """Return what is kept of a run, with all changes until now."""
        with self._following:
            history = self._kept.pop(row.run_id, None) or RunHistory(self._store)
            history.follow(row)
            self._kept[row.run_id] = history
            for oldest in list(self._kept)[:-KEPT_RUNS]:
                del self._kept[oldest]
        return history

    def _open_round(self, row: RunRow) -> RoundRow | None:
        """Return the first open round of a running run."""
        newest = self._store.rounds(row.run_id, row.rounds_closed + 1) if row.status == "running" else []
        return next((found for found in newest if not found.reason), None)


def update(
    row: UpdateRow, selected: RoundRow | None, opened_at: float | None = None, hidden: str = ""
) -> schemas.Update:
    """Return an assignment of the round `selected`, with its stages in seconds since `opened_at`.

    The default of `opened_at` is the opening of its own round. `hidden` says why the client's facts are not known.
    """
    if opened_at is None:
        opened_at = selected.opened_at if selected else row.assigned_at or 0.0
    shown = schemas.Update.model_validate(row)
    downtimes = selected.downtimes if selected else ()
    known = selected is None or not clock_was_set(selected)  # else a moment before it has no place beside one after it
    stages = [
        schemas.Stretch(stage=one.stage, begin_s=one.begin_s - opened_at, end_s=one.end_s - opened_at)
        for one in (stretches(row, downtimes) if known else [])
        if one.stage != "downtime"  # drawn once, behind all devices
    ]
    codec = {"codec": selected.codecs.get(row.device, selected.codec) if selected else ""}
    codec["codec_reason"] = sentence(selected.codec_reasons.get(row.device, ())) if selected else ""
    return shown.model_copy(update={"stretches": stages, "not_known": hidden, **codec})


def _went(took: RoundExplanation | None) -> dict[str, Any]:
    """Return the fields of `schemas.Went`."""
    took = took or RoundExplanation(0, 0.0, "")
    return {
        "why": took.sentence, "stages": dict(took.stages), "uncounted": dict(took.uncounted), "requests": took.requests,
        "rtt_s": took.rtt_s, "trips_s": took.trips_s,
    }  # fmt: skip


def _downtimes(found: RoundRow, begin: float) -> list[schemas.Downtime]:
    """Return the times without an aggregator, in seconds since `begin`; none if the wall clock was set."""
    return (
        []
        if clock_was_set(found)
        else [
            schemas.Downtime(begin_s=max(0.0, since - begin), end_s=until - begin)
            for since, until in found.downtimes
            if until > begin
        ]
    )


def _run(
    kind: type[Shown], row: RunRow, open_round: RoundRow | None, line: Sequence[RunRow], home: str, **more: Any
) -> Shown:  # fmt: skip
    """Return a run as the schema `kind`, with its sentence."""
    values = {name: getattr(row, name) for name in schemas.Run.model_fields if name != "sentence"}
    values["status_text"] = with_home(row.status_text, home)
    said = with_home(run_sentence(row, open_round, behind(row, line)), home)
    return kind(**values, sentence=said, **more)


def _round(row: RoundRow, history: RunHistory) -> schemas.Round:
    """Return a round with its explanation; the sums include all rounds before."""
    until, told = history.until(row.round), history.explained.get(row.round)
    sums = {"until_s": until.seconds, "until_payload": until.payload, "until_wire": until.wire}
    found = secure_rounds.protection(history.run, [len(row.selected)]) if history.run else None
    least = found.least if found else 0
    said: dict[str, Any] = {"closing": closing(row, least), "why": told.sentence if told else ""}
    said["epsilon_run"], said["epsilon"] = history.spending.by_round.get(row.round, (None, None))
    return schemas.Round.model_validate(row).model_copy(
        update={**sums, **said, "min_updates": max(row.min_updates, least)}
    )


EARLIER_ROUNDS = 20  # rounds in which earlier assignments are searched
AT_WORK = ("selected", "accepted")  # outcomes of an assignment that is not decided yet
AT_ONCE = 24  # rounds whose assignments are read at once, if so many are to be explained


@dataclass(frozen=True)
class RoundSums:
    """The seconds and bytes of one round, or of all rounds until one; `wire` is None if no transfer was measured."""

    seconds: float = 0.0
    payload: int = 0
    wire: int | None = None

    def __add__(self, other: RoundSums) -> RoundSums:
        measured = [wire for wire in (self.wire, other.wire) if wire is not None]
        return RoundSums(
            self.seconds + other.seconds, self.payload + other.payload, sum(measured) if measured else None
        )


class RunHistory:
    """The sums of a run's rounds and the explanations of the closed ones, which `follow` brings up to date.

    A late reply changes the explanation of its round when the next round closes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.run: RunRow | None = None  # as of the last call of `follow`
        self._change, self._status = 0, ""  # as of the last call of `follow`
        self._changed: dict[int, RoundRow] = {}  # rounds that changed since they were explained
        self._closed_at: dict[int, float | None] = {}
        self._own: dict[int, RoundSums] = {}
        self.spending = SpendingHistory(store)
        self.privacy: PrivacyState | None = None  # of a private run
        self.selected = set[int]()  # the numbers of clients that its rounds selected
        self._until = {0: RoundSums()}  # number of a round -> the sums of all rounds until its end
        self.explained: dict[int, RoundExplanation] = {}
        self.totals = RunTotals()

    @property
    def opened(self) -> int:
        """Return the number of rounds."""
        return len(self._own)

    def until(self, number: int) -> RoundSums:
        """Return the sums of the rounds from 1 to `number`."""
        return self._until[number]

    def follow(self, row: RunRow) -> None:
        """Read the rounds that changed since the last call, and what was spent."""
        self.run, self.privacy = row, self.spending.follow(row)
        changed = self._store.rounds(row.run_id, changed_after=self._change)
        for one in changed:
            self._change, self._changed[one.round] = max(self._change, one.changed), one
            self._closed_at[one.round] = one.closed_at
            self.selected.add(len(one.selected))
            up, down = RoundSums(0.0, one.payload_up, one.wire_up), RoundSums(0.0, one.payload_down, one.wire_down)
            self._own[one.round] = up + down + RoundSums(one.seconds or 0.0)
        for number in range(changed[0].round if changed else self.opened + 1, self.opened + 1):
            self._until[number] = self._until[number - 1] + self._own[number]
        closed = [one for one in self._changed.values() if one.reason]
        if row.status != self._status or any(one.round not in self.explained for one in closed):
            self._explain(row, closed)
            self._status, self._changed = row.status, {}

    def _explain(self, row: RunRow, closed: Sequence[RoundRow]) -> None:
        """Explain these rounds, and replace their earlier explanations in the totals."""
        trips = rtts(self._store, row)
        for start in range(0, len(closed), AT_ONCE):
            part = closed[start : start + AT_ONCE]
            since = {one.round: turn_at(one, self._closed_at.get(one.round - 1, 0.0)) for one in part}
            assignments = self._assignments(row, part)
            numbers = [one.round for one in part] if secure_rounds.is_secure(row) else []
            phases = [found for number in numbers for found in self._store.phases(row.run_id, number)]
            for told in whys(row, part, assignments, since, trips, phases):
                if earlier_told := self.explained.get(told.round):
                    self.totals.add(earlier_told, -1)
                self.totals.add(told)
                self.explained[told.round] = told

    def _assignments(self, row: RunRow, rounds: Sequence[RoundRow]) -> list[UpdateRow]:
        """Return the assignments of these rounds, and the earlier ones that were aggregated into them."""
        if len(rounds) == AT_ONCE:
            return self._store.updates(row.run_id, rounds[0].round - EARLIER_ROUNDS, rounds[-1].round)
        found = dict[str, UpdateRow]()
        for one in rounds:
            own = self._store.updates(row.run_id, one.round)
            before = earlier(row, one, own, lambda number: self._store.updates(row.run_id, number))
            found |= {assignment.assignment_id: assignment for assignment in [*own, *before]}
        return list(found.values())


def rtts(store: Store, row: RunRow) -> Mapping[str, float]:
    """Return the round-trip time of each device in seconds; empty for a simulation."""
    return round_trips(store.measures("rtt")) if row.source == "devices" else {}


def earlier(
    row: RunRow, found: RoundRow, own: Sequence[UpdateRow], read: Callable[[int], Sequence[UpdateRow]]
) -> list[UpdateRow]:
    """Return the assignments of earlier rounds that were aggregated into this one.

    For an open buffered round the result includes those that may still be aggregated into it.
    """
    missing = set(found.aggregated) - {one.update_id for one in own}
    waits = not found.reason and buffered(row)
    came = list[UpdateRow]()
    for number in range(found.round - 1, max(0, found.round - EARLIER_ROUNDS), -1):
        if found.reason and not missing:
            break
        assignments = read(number)
        mine = [one for one in assignments if one.update_id in missing or one.aggregated_round == found.round]
        came += mine + [one for one in assignments if waits and one.outcome in AT_WORK]
        missing -= {one.update_id for one in mine}
    return came


def client_states(
    run: RunRow,
    newest: RoundRow | None,
    latest: Sequence[Sequence[UpdateRow]],
    clients: Sequence[ClientRow],
    devices: Sequence[DeviceInfo],
) -> list[schemas.Client]:
    """Return every selected client, and every client that was not selected for the latest round, with the reason.

    `latest` are the assignments of the latest rounds, newest first. A client's state follows from its latest assignment
    and from its device's connection.
    """
    known, hidden = {info.row.name: info for info in devices}, secure_rounds.why_not_known(run)
    # a client that is busy with an earlier round is not selected for the latest one
    open_assignments = {u.device: u for rows in reversed(latest[1:]) for u in rows if u.outcome == "selected"}
    open_assignments |= {u.device: u for u in (latest[0] if latest else ()) if u.outcome in ("selected", "accepted")}
    working = open_assignments if newest is not None and not newest.reason and run.status not in ENDED else {}
    examples = {u.device: u.examples for rows in reversed(latest) for u in rows if u.examples}
    ratios = {u.device: u.residual_ratio for rows in reversed(latest) for u in rows if u.residual_ratio is not None}
    not_selected = {} if newest is None or run.status in ENDED else _not_selected(run, newest, clients, devices)
    shown = [
        schemas.Client(
            **{name: getattr(row, name) for name in _COUNTS}, examples=examples.get(row.device, 0),
            residual_ratio=ratios.get(row.device), not_known=hidden,
            **_now(run, working.get(row.device), known.get(row.device), not_selected.get(row.device)),
        )
        for row in clients
    ]  # fmt: skip
    absent = sorted(not_selected.keys() - {row.device for row in clients})
    return shown + [_never_selected(name, run, known.get(name), not_selected) for name in absent]


def _not_selected(
    run: RunRow, newest: RoundRow, clients: Sequence[ClientRow], devices: Sequence[DeviceInfo]
) -> dict[str, str]:
    """Return the reason of each device that the latest round considered and did not select.

    The round names no device that was not sampled: these are the others that were online when it opened.
    """
    reasons = {device: sentence(why) for device, why in newest.not_selected.items()}
    if not newest.not_sampled:
        return reasons
    online = [info.row.name for info in devices if info.online and (info.seen_at or math.inf) <= newest.opened_at]
    others = {row.device for row in clients} if run.source == "sim" else set(online)
    return {**dict.fromkeys(sorted(others.difference(newest.selected)), "not sampled"), **reasons}


_COUNTS = (
    "device", "selected", "arrived", "aggregated_count", "late", "dropped", "failed", "last_outcome", "last_at",
    "payload_up", "payload_down", "wire_up", "wire_down",
)  # fmt: skip


def _never_selected(name: str, run: RunRow, info: DeviceInfo | None, why: Mapping[str, str]) -> schemas.Client:
    """Return a client that was never selected, with the reason."""
    return schemas.Client(
        device=name, selected=0, arrived=0, aggregated_count=0, late=0, dropped=0, failed=0, examples=0,
        last_outcome="",
        last_at=None, payload_up=0, payload_down=0, wire_up=None, wire_down=None, **_now(run, None, info, why[name]),
    )  # fmt: skip


def _now(
    run: RunRow, assignment: UpdateRow | None, info: DeviceInfo | None, not_selected: str | None
) -> dict[str, object]:
    """Return a client's `state` as one word, with `state_text` for reading."""
    if info is not None and not info.online:
        return {"state": "offline", "state_text": "offline", "since": info.last_seen_at}
    if run.status in ENDED:
        return {"state": "idle", "state_text": "simulated" if run.source == "sim" else "idle"}
    if assignment is not None and assignment.outcome == "accepted":
        return {"state": "arrived", "state_text": f"round {assignment.round} is being aggregated"}
    if assignment is not None:
        return {"state": "working", "state_text": f"in round {assignment.round}", "since": assignment.assigned_at}
    if not_selected:
        return {"state": "not-selected", "state_text": f"not selected: {not_selected}"}
    return {"state": "idle", "state_text": "idle"}
