"""Reads of the store for the API about runs, rounds, clients and updates.

Open tabs repeat the same reads often. Therefore a run's rounds are cached until its journal has a new event. The
explanations of closed rounds are cached too, except for the latest rounds, which later replies may still change.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from thinwire.core.errors import NotFound
from thinwire.core.events import ENDED
from thinwire.core.formatting import with_home
from thinwire.core.layout import Layout
from thinwire.core.plan_schema import MOST_DELAY
from thinwire.reports.round_explanation import RoundExplanation, down_s, in_all, round_trips, why, whys
from thinwire.reports.round_timing import clock_was_set, turns
from thinwire.store import ClientRow, DeviceInfo, RoundRow, RunRow, Store, UpdateRow
from thinwire.store.queries import behind
from thinwire.web import schemas
from thinwire.web.run_text import buffered, closing, open_round, overlaps, run_sentence, stretches

Shown = TypeVar("Shown", bound=schemas.Run)

LATEST_ROUNDS = 3  # rounds in which a device's examples are searched
AHEAD = 1 + MOST_DELAY  # rounds that may be open at once
KEPT_RUNS = 8


class Reader:
    """All queries about runs. `home` is the `--home` option for commands in recorded sentences."""

    def __init__(self, store: Store, home: str = "") -> None:
        self._store, self._home = store, home
        self._kept: dict[str, tuple[int, list[RoundRow]]] = {}
        self._reasons = Reasons(store)

    def runs(self) -> list[schemas.Run]:
        """Return all runs, newest first; a running one has the state of its open round in its sentence."""
        rows, line = self._store.runs(), self._store.line()
        return [_run(schemas.Run, row, self._open_round(row), line, self._home) for row in rows]

    def run(self, name: str) -> schemas.RunPage:
        """Return one run with its clients and its time breakdown.

        `name` is an id, a unique beginning of one, or "latest".
        """
        store = self._store
        seq, row = store.last_seq(), store.run(name)
        rounds = self._rounds(row.run_id)
        latest = [store.updates(row.run_id, found.round) for found in rounds[: -LATEST_ROUNDS - 1 : -1]]
        newest = rounds[-1] if rounds else None
        clients = client_states(row, newest, latest, store.clients(row.run_id), store.devices())
        reasons = self._reasons.of(row, rounds)
        return _run(
            schemas.RunPage, row, self._open_round(row), store.line() if row.status == "queued" else (), self._home,
            plan=row.plan, model_digest=row.model_digest, layout_digest=Layout.from_json(row.layout).digest,
            task_version=row.task_report.version, seconds=sum(found.seconds or 0.0 for found in rounds),
            notes=[with_home(note, self._home) for note in row.notes], clients=clients, seq=seq, now=time.time(),
            **_went(in_all(reasons) if reasons else None),
        )  # fmt: skip

    def rounds(self, name: str, first: int = 1) -> list[schemas.Round]:
        """Return the run's rounds from `first` on, with sums since the run's start."""
        row = self._store.run(name)
        rounds = self._rounds(row.run_id)
        return _with_sums(rounds, first, {one.round: one.sentence for one in self._reasons.of(row, rounds)})

    def round(self, name: str, number: int) -> schemas.RoundPage:
        """Return one round with its assignments; `NotFound` if the run has not opened it."""
        row = self._store.run(name)
        rounds = self._rounds(row.run_id)
        found = next((candidate for candidate in rounds if candidate.round == number), None)
        if found is None:
            raise NotFound(f"{row.run_id} has no round {number}", why=f"it has opened {len(rounds)}")
        own = self._store.updates(row.run_id, number)
        before = earlier(row, found, own, lambda one: self._store.updates(row.run_id, one))
        turn_at = turns(rounds, self._store.current_round(row.run_id) if overlaps(row) else None)[number]
        ahead = [one.round for one in rounds if not one.reason and one.round < number]
        open_now = RoundExplanation(
            number, 0.0, open_round(found, own, before, buffered(row), ahead, taken=turn_at is not None)
        )
        took = open_now
        if found.reason:
            simulated, rtts = row.source == "sim", self._reasons.rtts(row)
            took = why(found, own, before, turn_at, simulated=simulated, rtts=rtts)
        said = {"slowest": took.device}
        shown = _with_sums([one for one in rounds if one.round <= number], number, {})[0].model_copy(update=said)
        of = {one.round: one for one in rounds}
        return schemas.RoundPage(
            **{**dict(shown), **_went(took)}, now=time.time(), waited_for=list(took.waited_for),
            deadline_reason=found.deadline_reason, sampling=found.sampling, turn_at=turn_at,
            missed_s=max(found.missed_s, down_s(found)),
            codecs=Counter(found.codecs.values()).most_common(),
            updates=[update(one, of.get(one.round), turn_at) for one in own],
            late_aggregated=[update(one, of.get(one.round), turn_at) for one in before],
            away=_absences(found, found.opened_at if turn_at is None else turn_at),
        )  # fmt: skip

    def updates(self, name: str, number: int | None) -> list[schemas.Update]:
        """Return every assignment of the run, or of one round."""
        run_id = self._store.run(name).run_id
        of = {found.round: found for found in self._rounds(run_id)}
        return [update(one, of.get(one.round)) for one in self._store.updates(run_id, number)]

    def _rounds(self, run_id: str) -> list[RoundRow]:
        """Return all rounds of a run, cached until its journal has a new event."""
        seq = self._store.last_seq(run_id)
        kept = self._kept.get(run_id, (-1, []))
        if kept[0] != seq:
            kept = self._kept[run_id] = (seq, self._store.rounds(run_id))
            for oldest in list(self._kept)[:-KEPT_RUNS]:
                self._kept.pop(oldest, None)
        return kept[1]

    def _open_round(self, row: RunRow) -> RoundRow | None:
        """Return the first open round of a running run."""
        newest = self._rounds(row.run_id)[-AHEAD:] if row.status == "running" else []
        return next((found for found in newest if not found.reason), None)


def update(row: UpdateRow, selected: RoundRow | None, opened_at: float | None = None) -> schemas.Update:
    """Return an assignment of the round `selected`, with its stages in seconds since `opened_at`.

    The default of `opened_at` is the opening of its own round.
    """
    if opened_at is None:
        opened_at = selected.opened_at if selected else row.assigned_at or 0.0
    shown = schemas.Update.model_validate(row)
    away = selected.away if selected else ()
    known = selected is None or not clock_was_set(selected)  # else a moment before it has no place beside one after it
    sampling = [schemas.Stretch.model_validate(one) for one in stretches(row, opened_at, away)] if known else []
    codec = {"codec": selected.codecs.get(row.device, selected.codec) if selected else ""}
    codec["codec_reason"] = selected.codec_reasons.get(row.device, "") if selected else ""
    return shown.model_copy(update={"stretches": sampling, **codec})


def _went(took: RoundExplanation | None) -> dict[str, Any]:
    """Return the fields of `schemas.Went`."""
    took = took or RoundExplanation(0, 0.0, "")
    return {
        "why": took.sentence, "stages": dict(took.stages), "uncounted": dict(took.uncounted), "requests": took.requests,
        "rtt_s": took.rtt_s, "trips_s": took.trips_s,
    }  # fmt: skip


def _absences(found: RoundRow, begin: float) -> list[schemas.Absence]:
    """Return the times without an aggregator, in seconds since `begin`; none if the wall clock was set."""
    return (
        []
        if clock_was_set(found)
        else [
            schemas.Absence(begin_s=max(0.0, since - begin), end_s=until - begin)
            for since, until in found.away
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


def _with_sums(rows: Sequence[RoundRow], first: int, reasons: Mapping[int, str]) -> list[schemas.Round]:
    """Return the rounds from `first` on with their explanations; the sums include all rounds before."""
    shown, until_s, payload, wire = list[schemas.Round](), 0.0, 0, None
    for row in rows:
        until_s += row.seconds or 0.0
        payload += row.payload_up + row.payload_down
        if row.wire_up is not None or row.wire_down is not None:
            wire = (wire or 0) + (row.wire_up or 0) + (row.wire_down or 0)
        if row.round >= first:
            sums = {"until_s": until_s, "until_payload": payload, "until_wire": wire}
            said = {"closing": closing(row), "why": reasons.get(row.round, "")}
            shown.append(schemas.Round.model_validate(row).model_copy(update={**sums, **said}))
    return shown


EARLIER_ROUNDS = 20  # rounds in which earlier assignments are searched
AT_WORK = ("selected", "accepted")  # outcomes of an assignment that is not decided yet
LOOK_BACK = 3  # closed rounds that are read again when another one closes: late replies add to them
AT_ONCE = 24  # rounds, from which on all assignments of a run are read at once


class Reasons:
    """A cache of round explanations for the last `KEPT_RUNS` runs.

    A late reply changes the explanation of its round when the next round closes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, tuple[object, list[RoundExplanation]]] = {}  # run -> its state, and what was read then

    def of(self, row: RunRow, rounds: Sequence[RoundRow]) -> list[RoundExplanation]:
        """Return the explanations of all closed rounds in their order; `rounds` are all rounds of the run."""
        closed = [one for one in rounds if one.reason]
        state, (read_in, found) = (len(closed), row.status), self._kept.pop(row.run_id, (None, []))
        if read_in != state:
            first = max(0, min(len(found), len(closed)) - LOOK_BACK)
            found = [*found[:first], *self._read(row, rounds, closed[first:])]
        self._kept[row.run_id] = state, found
        for oldest in list(self._kept)[:-KEPT_RUNS]:
            self._kept.pop(oldest, None)
        return found

    def rtts(self, row: RunRow) -> Mapping[str, float]:
        """Return the round-trip time of each device in seconds; empty for a simulation."""
        return round_trips(self._store.measures("rtt")) if row.source == "devices" else {}

    def _read(self, row: RunRow, rounds: Sequence[RoundRow], wanted: Sequence[RoundRow]) -> list[RoundExplanation]:
        """Compute the explanations of the `wanted` rounds."""
        if len(wanted) >= AT_ONCE:
            assignments = self._store.updates(row.run_id)
        else:
            assignments = assignments_of(row, wanted, lambda number: self._store.updates(row.run_id, number))
        return whys(row, wanted, assignments, turns(rounds), self.rtts(row))


def assignments_of(
    row: RunRow, rounds: Sequence[RoundRow], read: Callable[[int], Sequence[UpdateRow]]
) -> list[UpdateRow]:  # fmt: skip
    """Return the assignments of these rounds, and the earlier ones that were aggregated into them."""
    found = dict[str, UpdateRow]()
    for one in rounds:
        own = read(one.round)
        found |= {assignment.assignment_id: assignment for assignment in [*own, *earlier(row, one, own, read)]}
    return list(found.values())


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
    known = {info.row.name: info for info in devices}
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
            residual_ratio=ratios.get(row.device),
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
    if not newest.not_sampled:
        return newest.not_selected
    online = [info.row.name for info in devices if info.online and (info.seen_at or math.inf) <= newest.opened_at]
    others = {row.device for row in clients} if run.source == "sim" else set(online)
    return {**dict.fromkeys(sorted(others.difference(newest.selected)), "not sampled"), **newest.not_selected}


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
        return {"state": "away", "state_text": "away", "since": info.last_seen_at}
    if run.status in ENDED:
        return {"state": "idle", "state_text": "simulated" if run.source == "sim" else "idle"}
    if assignment is not None and assignment.outcome == "accepted":
        return {"state": "arrived", "state_text": f"round {assignment.round} is being aggregated"}
    if assignment is not None:
        return {"state": "working", "state_text": f"in round {assignment.round}", "since": assignment.assigned_at}
    if not_selected:
        return {"state": "not-selected", "state_text": f"not selected: {not_selected}"}
    return {"state": "idle", "state_text": "idle"}


def upload_rate(one: UpdateRow) -> float | None:
    """Return the upload rate of a reply in bytes a second, from its first byte to its last; None if unknown."""
    size = one.payload_up if one.wire_up is None else one.wire_up
    if one.arrived_at is None or one.began_at is None or one.arrived_at <= one.began_at or not size:
        return None
    return size / (one.arrived_at - one.began_at)
