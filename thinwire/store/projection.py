"""The projection of the journal: applies events to the read tables.

Invariants: after any number of events, each count and each sum of bytes in `rounds`, `clients` and `runs` equals the
sum over the rows of `updates`. A run's bytes also include those of evaluating its last model. An event without news (an
update aggregated again after a restart) changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from thinwire.core.events import (
    OVER,
    AskedInFull,
    AskTakenUp,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Evaluated,
    Event,
    FirstModelAsked,
    FirstModelFailed,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RoundTakenUp,
    RunNoted,
    RunStatusChanged,
    UpdateAccepted,
    UpdateDropped,
    UpdateFolded,
    capped_text,
)
from thinwire.core.types import UpdateId
from thinwire.store.run_tables import Checkpoint, Round, Run, Update
from thinwire.store.write_batch import CounterDeltas, Row, Rows, columns

MOMENTS = {"running": "started_at", "done": "finished_at", "failed": "finished_at", "stopped": "finished_at"}


@dataclass(frozen=True)
class Facts:
    """The constants of a run."""

    run_id: str
    size: int
    metric: str


@dataclass
class Projection:
    """Applies the events of one transaction; `finish` writes the changes."""

    connection: Connection
    facts: Facts
    sums: CounterDeltas = field(init=False)
    asks: UpdateProjector = field(init=False)

    def __post_init__(self) -> None:
        self.sums = CounterDeltas(self.connection, self.facts.run_id)
        self.asks = UpdateProjector(self.connection, self.facts.run_id, self.facts.size, self.sums)

    def apply(self, event: Event) -> None:
        """Apply one event."""
        match event:
            case RunStatusChanged():
                self._status(event)
            case RunNoted():
                self._noted(event.text)
            case FirstModelAsked() | FirstModelFailed():
                self.sums.takes_part(event.device)
                self._noted(event.text, instead_of=f"{event.device}, asked for the first model: ")
            case ModelStored():
                self._model(event)
            case RoundOpened():
                self._opened(event)
            case RoundTakenUp():
                self._taken_up(event)
            case RoundClosed():
                self._closed(event)
            case Evaluated():
                self._evaluated(event)
            case _:
                self.asks.apply(event)

    def finish(self) -> None:
        """Write all changes to the tables."""
        self.asks.rows.write()
        self.sums.write()

    def _run(self, **values: Any) -> None:
        self.sums.of_run.update(values)

    def _round(self, number: int, **values: Any) -> None:
        self.sums.of_rounds[number].update(values)

    def _status(self, event: RunStatusChanged) -> None:
        self._run(status=event.status, status_text=event.text, exit_code=event.exit_code)
        if moment := MOMENTS.get(event.status):
            self.sums.of_run.setdefault(moment, event.at)  # the first time stays

    def _noted(self, text: str, instead_of: str = "") -> None:
        """Add a note to the run; a note replaces earlier ones that begin with `instead_of`."""
        known = self.sums.of_run.get("notes")
        if known is None:
            known = self.connection.scalar(select(Run.notes).where(Run.run_id == self.facts.run_id)) or []
        kept = [note for note in known if not (instead_of and note.startswith(instead_of))]
        self._run(notes=[*kept, text])

    def _model(self, event: ModelStored) -> None:
        self.connection.execute(_NO_CHECKPOINT, {"the_run": self.facts.run_id, "the_version": event.version})
        row = {"digest": event.digest, "file": event.file, "parts": event.parts, "counters": dict(event.counters)}
        own = {"run_id": self.facts.run_id, "version": event.version, "at": event.at}
        self.connection.execute(_CHECKPOINT, {**row, **own})
        self._run(version=event.version, model_digest=event.digest, model_file=event.file)

    def _opened(self, event: RoundOpened) -> None:
        row = {
            name: getattr(event, name)
            for name in (
                "round", "base_version", "deadline_s", "deadline_reason", "drawn", "codec", "target", "floor",
                "candidates",
            )
        }  # fmt: skip
        row |= {"opened_at": event.at, "asked": list(event.asks), "not_asked": dict(event.reasons)}
        row |= {"codecs": dict(event.codecs), "codec_reasons": dict(event.codec_reasons)}
        self.sums.opened.append(row)

    def _taken_up(self, event: RoundTakenUp) -> None:
        """Add a downtime of the aggregator to the open round."""
        known = self.sums.told_of(event.round).get("away")
        if known is None:
            where = (Round.run_id == self.facts.run_id, Round.round == event.round)
            known = self.connection.scalar(select(Round.away).where(*where)) or []
        away = [event.gone_at, event.at, *([event.set_by_s] if event.set_by_s else [])]
        self._round(event.round, away=[*known, away], missed_s=event.missed_s)

    def _closed(self, event: RoundClosed) -> None:
        self.asks.settle(event.folded, "folded", event)
        self.asks.settle(event.dropped, "dropped", event, event.reason)
        self.asks.cap(event)
        self._round(
            event.round, closed_at=event.at, reason=event.reason, version=event.version, folded=list(event.folded),
            seconds=event.seconds, train_metrics=dict(event.metrics), spent=dict(event.spent), slowest=event.slowest,
            ignored=event.ignored,
        )  # fmt: skip
        if event.names or event.ignored:  # older journals have neither
            self.asks.forget_metrics(event)
        self.sums.run["rounds_closed"] += 1

    def _evaluated(self, event: Evaluated) -> None:
        amounts = {
            "payload_down": event.payload_bytes, "wire_down": event.sent_bytes, "wire_up": event.received_bytes,
            "dense_down": event.models_sent * self.facts.size * FLOAT_BYTES,
        }  # fmt: skip
        self.sums.run.update({name: amount for name, amount in amounts.items() if amount})
        best: Mapping[str, Any] = {}
        if event.best:
            best = {"best_version": event.version, "best_value": event.decisive.get(self.facts.metric)}
        clipped: dict[str, Any] = {}
        if event.clipped:
            clipped = {"means": dict(event.robust), "clients": self.asks.clip(event.clipped)}
        self._run(metrics=dict(event.metrics), clipped=clipped, **best)
        if event.round:
            self._round(event.round, metrics=dict(event.metrics), spread=dict(event.spread), clipped=clipped)
        else:
            spread = {name: found for name, found in event.spread.items() if name not in event.robust}
            self._run(metrics0=event.decisive, spread0=spread)


_CHECKPOINT = insert(Checkpoint)
_NO_CHECKPOINT = delete(Checkpoint).where(
    Checkpoint.run_id == bindparam("the_run"), Checkpoint.version == bindparam("the_version")
)


FLOAT_BYTES = 4


@dataclass
class UpdateProjector:
    """Applies the events of assignments to `updates`, and counts each change in the sums of its round, client and run.

    `size` is the number of the model's values. `rows` writes the rows.
    """

    connection: Connection
    run_id: str
    size: int
    sums: CounterDeltas
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows(self.connection, self.run_id)

    def apply(self, event: Event) -> None:
        """Apply an event if it belongs to an assignment."""
        match event:
            case ClientAsked():
                self._asked(event)
            case AskTakenUp():
                self._taken(event)
            case AskedInFull():
                self._asked_in_full(event)
            case UpdateAccepted():
                self._answered(event, "accepted", late_answer=event.late, staleness=event.staleness)
            case UpdateFolded():
                self.settle([event.update_id], "folded", event)
            case UpdateDropped():
                self._answered(event, "dropped", reason=event.reason)
            case ClientFailed():
                self._failed(event)
            case ClientBack():
                self._back(event)

    def _asked(self, event: ClientAsked) -> None:
        reasons = {"asked_why": event.why, "instead_of": event.instead_of, "work_reason": event.work_reason}
        self._new_row(
            event.round, event.device, event.ask_id, asked_at=event.at, payload_down=event.payload_bytes, **reasons
        )
        if event.why:
            self._asked_since(event)
        dense = self.size * FLOAT_BYTES
        self.sums.add(event.round, event.device, payload_down=event.payload_bytes)
        self.sums.run["dense_down"] += dense

    def _asked_since(self, event: ClientAsked) -> None:
        """Add a device that was selected in the middle of its round to the round's devices."""
        known = self.sums.told_of(event.round)
        if "asked" not in known:
            where = (Round.run_id == self.run_id, Round.round == event.round)
            wanted = select(Round.asked, Round.not_asked, Round.codecs, Round.codec_reasons).where(*where)
            known = dict(self.connection.execute(wanted).mappings().one())
        not_asked = {device: why for device, why in known["not_asked"].items() if device != event.device}
        own = {"codecs": event.codec, "codec_reasons": event.codec_reason}
        laddered = {name: {**known[name], **({event.device: said} if said else {})} for name, said in own.items()}
        self.sums.of_rounds[event.round].update(asked=[*known["asked"], event.device], not_asked=not_asked, **laddered)

    def _asked_in_full(self, event: AskedInFull) -> None:
        self.sums.add(event.round, event.device, payload_down=event.payload_bytes)
        where = (Update.run_id == self.run_id, Update.ask_id == event.ask_id)
        self.rows.write()  # the row may have been added in this transaction
        # the device could not use the first delivery
        more = {"payload_down": Update.payload_down + event.payload_bytes, "taken_at": None}
        self.connection.execute(update(Update).where(*where).values(more))

    def _taken(self, event: AskTakenUp) -> None:
        """Set the time of delivery, once: a delivery reported after a restart is the same one."""
        row = self.rows.find(event.ask_id)
        if row is not None and not row["update_id"] and row["pulled_at"] is None:
            self.rows.change(row, taken_at=event.at, pulled_at=event.at)

    def _new_row(self, round_number: int, device: str, ask_id: str, **values: Any) -> Row:
        self.sums.ask(device)
        return self.rows.new(round_number, device, ask_id, **values)

    def _answered(self, event: UpdateAccepted | UpdateDropped, outcome: str, **values: Any) -> None:
        """Set a reply's outcome, and copy its columns once.

        The outcome may change later: accepted, then found to be invalid.
        """
        sequence = UpdateId.parse(event.update_id).sequence
        row = self.rows.find(event.ask_id) or self._new_row(event.asked_round, event.device, event.ask_id)
        self.sums.saw(event.device, sequence)
        if row["update_id"] not in ("", event.update_id):
            return  # a second reply to the same assignment: it stays in the journal only
        fresh = {} if row["update_id"] else {**columns(event.head), "update_id": event.update_id}
        if fresh and fresh["pulled_at"] is None:
            del fresh["pulled_at"]  # an earlier aggregator process delivered it, and its event has the time
        if fresh:
            self.sums.add(row["round"], row["device"], wire_down=fresh["wire_down"])
            came = {name: fresh[name] for name in ("payload_up", "wire_up")}
            self.sums.add(event.round, row["device"], arrived=1, **came)
            self.sums.run["dense_up"] += self.size * FLOAT_BYTES if event.head.get("parts") else 0
        self._turn(row, outcome, event.at, **fresh, **values)

    def _failed(self, event: ClientFailed) -> None:
        row = self.rows.find(event.ask_id)
        if row is not None and row["outcome"] == "asked":
            if event.kind == OVER:
                self._turn(row, OVER, event.at, reason=event.text)
            else:
                self._turn(row, "failed", event.at, reason=f"{event.kind}: {event.text}", failed_at=event.at)

    def _back(self, event: ClientBack) -> None:
        """Set the assignment of a reconnected device to pending again."""
        row = self.rows.find(event.ask_id)
        if row is not None and row["outcome"] == "failed":
            self._turn(row, "asked", event.at, reason="", failed_at=None)
            self.sums.outcomes[event.device] = ("asked: it had left and is back", event.at)

    def settle(
        self, update_ids: Iterable[str], outcome: str, event: UpdateFolded | RoundClosed, reason: str = ""
    ) -> None:
        """Set the outcome of updates to aggregated or dropped; an aggregated late update gets the outcome `late`."""
        for row in self.rows.by_update(update_ids):
            if outcome == "folded":
                self._turn(row, "late" if row["late_answer"] else "folded", event.at, folded_round=event.round)
            elif row["outcome"] != "dropped":
                self._turn(row, "dropped", event.at, reason=reason, folded_round=None)

    def cap(self, event: RoundClosed) -> None:
        """Store the reason why an update has less weight than its reply claims, next to its outcome."""
        for row in self.rows.by_update(event.capped):
            self.rows.change(row, reason=capped_text(event.capped[row["update_id"]]))

    def forget_metrics(self, event: RoundClosed) -> None:
        """Keep of the round's replies only the metrics that most of its updates carried."""
        for row in self.rows.by_update([*event.folded, *event.dropped]):
            kept = {name: value for name, value in row["metrics"].items() if name in event.names}
            if kept.keys() != row["metrics"].keys():
                self.rows.change(row, metrics=kept)

    def clip(self, clipped: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Mark the replies whose metrics were clipped; return the names of these metrics by device."""
        for row in self.rows.by_update(clipped):
            self.rows.change(row, clipped=clipped[row["update_id"]])
        return {UpdateId.parse(update_id).device: names for update_id, names in clipped.items()}

    def _turn(self, row: Row, outcome: str, at: float, **values: Any) -> None:
        """Change the outcome of a row, and update the counts."""
        if row["outcome"] == outcome and "update_id" not in values:
            return  # nothing new
        self.sums.turn(row["round"], row["device"], row["outcome"], outcome, values.get("reason", ""), at)
        self.rows.change(row, outcome=outcome, **values)
