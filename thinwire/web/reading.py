"""From the store's rows to the answers of the API."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from thinwire.core.errors import NotFound
from thinwire.core.layout import Layout
from thinwire.core.sections import MOST_DELAY
from thinwire.store import RoundRow, RunRow, Store, UpdateRow
from thinwire.store.one_clock import on_one_clock
from thinwire.store.queue import behind
from thinwire.store.stages import turns
from thinwire.store.why import Why, why
from thinwire.store.why_of_run import in_all
from thinwire.store.why_words import gone_s
from thinwire.web import models
from thinwire.web.reasons import Reasons, earlier
from thinwire.web.sentences import buffered, closing, open_round, overlaps, run_sentence
from thinwire.web.timeline import stretches
from thinwire.web.typed import with_home
from thinwire.web.working import client_states

Shown = TypeVar("Shown", bound=models.Run)

LATEST_ROUNDS = 3  # in which a device's examples are looked for
AHEAD = 1 + MOST_DELAY  # rounds that may be open at once
KEPT_RUNS = 8


class Reader:
    """All reads of the page. A run's rounds are kept until the journal has news of it: tabs ask for them often.

    `home` is what the commands in recorded sentences need to find our state directory.
    """

    def __init__(self, store: Store, home: str = "") -> None:
        self._store, self._home = store, home
        self._kept: dict[str, tuple[int, list[RoundRow]]] = {}
        self._reasons = Reasons(store)

    def runs(self) -> list[models.Run]:
        """Newest first; one that goes on says how far its round is."""
        rows, line = self._store.runs(), self._store.line()
        return [_run(models.Run, row, self._open_round(row), line, self._home) for row in rows]

    def run(self, name: str) -> models.RunPage:
        store = self._store
        seq, row = store.last_seq(), store.run(name)
        rounds = self._rounds(row.run_id)
        latest = [store.updates(row.run_id, found.round) for found in rounds[: -LATEST_ROUNDS - 1 : -1]]
        newest = rounds[-1] if rounds else None
        clients = client_states(row, newest, latest, store.clients(row.run_id), store.devices())
        reasons = self._reasons.of(row, rounds)
        return _run(
            models.RunPage, row, self._open_round(row), store.line() if row.status == "queued" else (), self._home,
            plan=row.plan, model_digest=row.model_digest, layout_digest=Layout.from_json(row.layout).digest,
            task_version=row.task_report.version, seconds=sum(found.seconds or 0.0 for found in rounds),
            notes=[with_home(note, self._home) for note in row.notes], clients=clients, seq=seq, now=time.time(),
            **_went(in_all(reasons) if reasons else None),
        )  # fmt: skip

    def rounds(self, name: str, first: int = 1) -> list[models.Round]:
        """The run's rounds from `first` on, with sums since the run's begin."""
        row = self._store.run(name)
        rounds = self._rounds(row.run_id)
        return _with_sums(rounds, first, {one.round: one.sentence for one in self._reasons.of(row, rounds)})

    def round(self, name: str, number: int) -> models.RoundPage:
        row = self._store.run(name)
        rounds = self._rounds(row.run_id)
        found = next((candidate for candidate in rounds if candidate.round == number), None)
        if found is None:
            raise NotFound(f"{row.run_id} has no round {number}", why=f"it has opened {len(rounds)}")
        own = self._store.updates(row.run_id, number)
        before = earlier(row, found, own, lambda one: self._store.updates(row.run_id, one))
        turn_at = turns(rounds, self._store.head_taken(row.run_id) if overlaps(row) else None)[number]
        ahead = [one.round for one in rounds if not one.reason and one.round < number]
        open_now = Why(number, 0.0, open_round(found, own, before, buffered(row), ahead, taken=turn_at is not None))
        took = open_now
        if found.reason:
            simulated, rtts = row.source == "sim", self._reasons.rtts(row)
            took = why(found, own, row.size, before, turn_at, simulated=simulated, rtts=rtts)
        missed_s = max(found.missed_s, gone_s(found))
        found, turn_at, (own, before) = on_one_clock(found, turn_at, own, before)
        said = {"slowest": took.device, "opened_at": found.opened_at}
        shown = _with_sums([one for one in rounds if one.round <= number], number, {})[0].model_copy(update=said)
        of = {one.round: one for one in rounds} | {number: found}
        return models.RoundPage(
            **{**dict(shown), **_went(took)}, now=time.time(), waited_for=list(took.waited_for),
            deadline_reason=found.deadline_reason, drawn=found.drawn, turn_at=turn_at,
            missed_s=missed_s,
            codecs=Counter(found.codecs.values()).most_common(),
            updates=[update(one, of.get(one.round), turn_at) for one in own],
            late_folded=[update(one, of.get(one.round), turn_at) for one in before],
            away=_absences(found, found.opened_at if turn_at is None else turn_at),
        )  # fmt: skip

    def updates(self, name: str, number: int | None) -> list[models.Update]:
        """Every ask of the run, or of one round."""
        run_id = self._store.run(name).run_id
        of = {found.round: found for found in self._rounds(run_id)}
        return [update(one, of.get(one.round)) for one in self._store.updates(run_id, number)]

    def _rounds(self, run_id: str) -> list[RoundRow]:
        seq = self._store.last_seq(run_id)
        kept = self._kept.get(run_id, (-1, []))
        if kept[0] != seq:
            kept = self._kept[run_id] = (seq, self._store.rounds(run_id))
            for oldest in list(self._kept)[:-KEPT_RUNS]:
                self._kept.pop(oldest, None)
        return kept[1]

    def _open_round(self, row: RunRow) -> RoundRow | None:
        newest = self._rounds(row.run_id)[-AHEAD:] if row.status == "running" else []
        return next((found for found in newest if not found.reason), None)


def update(row: UpdateRow, asked: RoundRow | None, opened_at: float | None = None) -> models.Update:
    """An ask of the round `asked`, as seen from one that began at `opened_at`: its own where that is not said."""
    if opened_at is None:
        opened_at = asked.opened_at if asked else row.asked_at or 0.0
    shown = models.Update.model_validate(row)
    drawn = [models.Stretch.model_validate(one) for one in stretches(row, opened_at, asked.away if asked else ())]
    codec = {"codec": asked.codecs.get(row.device, asked.codec) if asked else ""}
    codec["codec_reason"] = asked.codec_reasons.get(row.device, "") if asked else ""
    return shown.model_copy(update={"stretches": drawn, **codec})


def _went(took: Why | None) -> dict[str, Any]:
    """The fields of `models.Went`."""
    took = took or Why(0, 0.0, "")
    return {
        "why": took.sentence, "stages": dict(took.stages), "uncounted": dict(took.uncounted), "requests": took.requests,
        "rtt_s": took.rtt_s, "trips_s": took.trips_s,
    }  # fmt: skip


def _absences(found: RoundRow, begin: float) -> list[models.Absence]:
    return [
        models.Absence(begin_s=max(0.0, since - begin), end_s=until - begin)
        for since, until in found.away
        if until > begin
    ]


def _run(
    kind: type[Shown], row: RunRow, open_round: RoundRow | None, line: Sequence[RunRow], home: str, **more: Any
) -> Shown:  # fmt: skip
    values = {name: getattr(row, name) for name in models.Run.model_fields if name != "sentence"}
    values["status_text"] = with_home(row.status_text, home)
    said = with_home(run_sentence(row, open_round, behind(row, line)), home)
    return kind(**values, sentence=said, **more)


def _with_sums(rows: Sequence[RoundRow], first: int, reasons: Mapping[int, str]) -> list[models.Round]:
    """The rounds from `first` on, with their reasons; the sums are over all before them too."""
    shown, until_s, payload, wire = list[models.Round](), 0.0, 0, None
    for row in rows:
        until_s += row.seconds or 0.0
        payload += row.payload_up + row.payload_down
        if row.wire_up is not None or row.wire_down is not None:
            wire = (wire or 0) + (row.wire_up or 0) + (row.wire_down or 0)
        if row.round >= first:
            sums = {"until_s": until_s, "until_payload": payload, "until_wire": wire}
            said = {"closing": closing(row), "why": reasons.get(row.round, "")}
            shown.append(models.Round.model_validate(row).model_copy(update={**sums, **said}))
    return shown
