"""The projection of the journal: applies events to the read tables.

Invariants: after any number of events, each count and each sum of bytes in `rounds`, `clients` and `runs` equals the
sum over the rows of `updates`. A run's bytes also include those of evaluating its last model. An event without news (an
update aggregated again after a restart) changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update

from thinwire.core import run_events
from thinwire.core.events import (
    OVER,
    AssignmentDelivered,
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Evaluated,
    Event,
    FullModelSent,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RoundResumed,
    RunNoted,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.formatting import CHOSEN, Reasons, capped_text
from thinwire.core.layout import FLOAT_BYTES
from thinwire.core.types import UpdateId
from thinwire.store import privacy_ledger
from thinwire.store.database import upsert
from thinwire.store.explaining import Explainer, RunFacts
from thinwire.store.tables import Checkpoint, Round, RoundPhase, Run, Snapshot, Update
from thinwire.store.write_batch import CounterDeltas, KnownRows, Row, Rows, columns

SUM_FIELDS = ("survivors", "weight", "norm", "clip", "next_clip", "elapsed_s", "unmask_s")  # of a `SumUnmasked`
PROTECTED_FIELDS = ("parts", "transfer")  # of the header of a protected update; the other fields hold zeros
STATUS_TIMES = {"running": "started_at", "done": "finished_at", "failed": "finished_at", "stopped": "finished_at"}


@dataclass
class Projection:
    """Applies the events of one transaction; `finish` writes the changes."""

    connection: Connection
    facts: RunFacts
    known: KnownRows
    sums: CounterDeltas = field(init=False)
    assignments: UpdateProjector = field(init=False)
    closed: list[int] = field(default_factory=list)  # rounds that ended in this transaction

    def __post_init__(self) -> None:
        self.known.changes += 1
        self.sums = CounterDeltas(self.connection, self.facts.run_id, self.known.devices, self.known.changes)
        self.assignments = UpdateProjector(self.connection, self.facts, self.sums, self.known)

    def apply(self, event: Event) -> None:
        """Apply one event, or of a run with Poisson sampling what may be shown of it."""
        if (shown := run_events.without_sample(event) if self.facts.sampled else event) is not None:
            self._apply(shown)

    def _apply(self, event: Event) -> None:
        match event:
            case RunStatusChanged():
                self._status(event)
            case RunNoted():
                self._noted(event.note)
            case run_events.RunExtended():
                self._noted(event.note)
                values = {"the_run": self.facts.run_id, "plan": dict(event.plan), "rounds_total": event.rounds}
                self.connection.execute(_EXTENDED, values)
            case run_events.FirstModelAssigned() | run_events.FirstModelFailed():
                self.sums.ensure_client(event.device)
                self._noted(event.note, about=event.device)
            case ModelStored():
                self._model(event)
            case RoundOpened():
                self._opened(event)
            case RoundResumed():
                self._resumed(event)
            case RoundClosed():
                self._closed(event)
            case Evaluated():
                self._evaluated(event)
            case run_events.PhaseClosed():
                self._phase(event)
            case run_events.SumUnmasked():
                self._round(event.round, secure_sum={name: getattr(event, name) for name in SUM_FIELDS})
            case run_events.PrivacyReserved():
                self.known.reserved.add(event.round)
                privacy_ledger.reserve(self.connection, self.facts.run_id, event)
            case run_events.PrivacyCommitted():
                privacy_ledger.commit(self.connection, self.facts.run_id, event)
            case _:
                self.assignments.apply(event)

    def finish(self) -> None:
        """Write all changes to the tables."""
        self.assignments.rows.write()
        self.sums.write()
        self._explain()
        if self.closed:
            self.known.forget(self.closed)

    def _explain(self) -> None:
        """Store the explanations of the rounds that ended here, and of earlier ones that changed."""
        closed = (self.sums.rounds.keys() | self.assignments.changed_outcomes.keys()) - self.known.selections.keys()
        changed = {number: devices for number, devices in self.assignments.changed_outcomes.items() if number in closed}
        added = {number: self.sums.rounds[number] for number in closed & self.sums.rounds.keys()}
        Explainer(self.connection, self.facts, self.known.changes).store(self.closed, changed, added)

    def _run(self, **values: Any) -> None:
        self.sums.of_run.update(values)

    def _round(self, number: int, **values: Any) -> None:
        self.sums.of_rounds[number].update(values)

    def _status(self, event: RunStatusChanged) -> None:
        self._run(status=event.status, status_text=event.text, exit_code=event.exit_code)
        if moment := STATUS_TIMES.get(event.status):
            self.sums.of_run.setdefault(moment, event.at)  # the first time stays
        if moment == "finished_at":
            self.connection.execute(_NO_SNAPSHOT, {"the_run": self.facts.run_id})

    def _noted(self, note: Reasons, about: str = "") -> None:
        """Add a note to the run; it replaces earlier ones `about` a device."""
        notes = self.sums.of_run.get("notes")
        if notes is None:
            notes = self.connection.scalar(select(Run.c.notes).where(Run.c.run_id == self.facts.run_id)) or []
        kept = [earlier for earlier in notes if not (about and earlier[0][1].get("device") == about)]
        self._run(notes=[*kept, note])

    def _model(self, event: ModelStored) -> None:
        row = {"digest": event.digest, "file": event.file, "parts": event.parts, "counters": dict(event.counters)}
        own = {"run_id": self.facts.run_id, "version": event.version, "at": event.at}
        upsert(self.connection, Checkpoint, [{**row, **own}])
        self._run(version=event.version, model_digest=event.digest, model_file=event.file)

    def _opened(self, event: RoundOpened) -> None:
        row = {
            name: getattr(event, name)
            for name in (
                "round", "base_version", "deadline_s", "deadline_reason", "sampling", "codec", "target_updates",
                "min_updates", "considered",
            )
        }  # fmt: skip
        selection = {"selected": list(event.assignments), "not_selected": dict(event.reasons)}
        selection |= {"codecs": dict(event.codecs), "codec_reasons": dict(event.codec_reasons)}
        self.known.selections[event.round] = selection
        self.sums.opened.append({**row, "opened_at": event.at, **selection})

    def _resumed(self, event: RoundResumed) -> None:
        """Add a downtime of the aggregator to the open round."""
        known = self.sums.values_set_in(event.round).get("downtimes")
        if known is None:
            where = (Round.c.run_id == self.facts.run_id, Round.c.round == event.round)
            known = self.connection.scalar(select(Round.c.downtimes).where(*where)) or []
        self._round(event.round, downtimes=[*known, [event.down_since, event.at]], missed_s=event.missed_s)

    def _phase(self, event: run_events.PhaseClosed) -> None:
        """Add a closed phase of a round; a phase that is closed again after a restart replaces the first one."""
        if event.phase != "masked":  # its messages are the updates
            key = {"the_run": self.facts.run_id, "the_round": event.round, "the_phase": event.phase}
            self.assignments.send(event, self.connection.scalar(_RECEIVED, key) or {})
        row = {"round": event.round, "phase": event.phase, "closed_at": event.at, "elapsed_s": event.elapsed_s}
        row |= {"run_id": self.facts.run_id, "received": dict(event.received), "dropped": list(event.dropped)}
        upsert(self.connection, RoundPhase, [row])

    def _closed(self, event: RoundClosed) -> None:
        replied = self.assignments.settle(event.aggregated, "aggregated", event)
        replied += self.assignments.settle(event.dropped, "dropped", event, event.reason)
        self.assignments.cap(event)
        self._round(
            event.round, closed_at=event.at, reason=event.reason, detail=event.detail, version=event.version,
            aggregated=list(event.aggregated), replied=replied, unanswered=len(event.outstanding),
            seconds=event.seconds, train_metrics=dict(event.metrics), spent=dict(event.spent), slowest=event.slowest,
            ignored=event.ignored,
        )  # fmt: skip
        if event.names or event.ignored:  # older journals have neither
            self.assignments.forget_metrics(event)
        self.sums.run["rounds_closed"] += 1
        self.closed.append(event.round)

    def _evaluated(self, event: Evaluated) -> None:
        amounts = {
            "payload_down": event.payload_bytes, "wire_down": event.sent_bytes, "wire_up": event.received_bytes,
            "dense_down": event.models_sent * self.facts.size * FLOAT_BYTES,
        }  # fmt: skip
        for name, amount in amounts.items():
            if amount:
                self.sums.run[name] += amount
        best: Mapping[str, Any] = {}
        if event.best:
            best = {"best_version": event.version, "best_value": event.decisive.get(self.facts.metric)}
        clipped: dict[str, Any] = {}
        if event.clipped:
            clipped = {"means": dict(event.robust), "clients": self.assignments.clip(event.clipped)}
        self._run(metrics=dict(event.metrics), clipped=clipped, **best)
        if event.round:
            self._round(event.round, metrics=dict(event.metrics), spread=dict(event.spread), clipped=clipped)
            if event.metrics:
                self.known.points += 1
                self._round(event.round, point=self.known.points)
        else:
            spread = {name: value for name, value in event.spread.items() if name not in event.robust}
            self._run(metrics0=event.decisive, spread0=spread)


_EXTENDED = update(Run).where(Run.c.run_id == bindparam("the_run")).values(finished_at=None)
_NO_SNAPSHOT = delete(Snapshot).where(Snapshot.c.run_id == bindparam("the_run"))
_RECEIVED = select(RoundPhase.c.received).where(
    RoundPhase.c.run_id == bindparam("the_run"), RoundPhase.c.round == bindparam("the_round"),
    RoundPhase.c.phase == bindparam("the_phase"),
)  # fmt: skip


@dataclass
class UpdateProjector:
    """Applies the events of assignments to `updates`, and counts each change in the sums of its round, client and run.

    `rows` writes the rows.
    """

    connection: Connection
    facts: RunFacts
    sums: CounterDeltas
    known: KnownRows
    changed_outcomes: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # round -> devices
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows(self.connection, self.facts.run_id, self.known)

    def apply(self, event: Event) -> None:
        """Apply an event if it belongs to an assignment."""
        match event:
            case ClientSelected():
                self._selected(event)
            case AssignmentDelivered():
                self._delivered(event)
            case FullModelSent():
                self._full_model_sent(event)
            case UpdateAccepted():
                self._replied(event, "accepted", late_reply=event.late, staleness=event.staleness)
            case UpdateAggregated():
                self.settle([event.update_id], "aggregated", event)
            case UpdateDropped():
                self._replied(event, "dropped", reason=": ".join(filter(None, (event.reason, event.detail))))
            case ClientFailed():
                self._failed(event)
            case ClientReconnected():
                self._reconnected(event)

    def _selected(self, event: ClientSelected) -> None:
        reasons = {"selection_reason": event.why, "instead_of": event.instead_of, "work_reason": event.work_reason}
        self._new_row(
            event.round,
            event.device,
            event.assignment_id,
            assigned_at=event.at,
            payload_down=event.payload_bytes,
            **reasons,
        )
        if event.why:
            self._selected_in_open_round(event)
            if self.facts.protected or event.round in self.known.reserved:
                privacy_ledger.join(self.connection, self.facts.run_id, event)
        dense = self.facts.size * FLOAT_BYTES
        self.sums.add(event.round, event.device, payload_down=event.payload_bytes)
        self.sums.run["dense_down"] += dense

    def _selected_in_open_round(self, event: ClientSelected) -> None:
        """Add a device that was selected in the middle of its round to the round's devices."""
        known = self.known.selections[event.round]
        known["selected"].append(event.device)
        known["not_selected"].pop(event.device, None)
        for name, said in {"codecs": event.codec, "codec_reasons": event.codec_reason}.items():
            if said:
                known[name][event.device] = said
        self.sums.of_rounds[event.round].update(known)

    def _full_model_sent(self, event: FullModelSent) -> None:
        self.sums.add(event.round, event.device, payload_down=event.payload_bytes)
        where = (Update.c.run_id == self.facts.run_id, Update.c.assignment_id == event.assignment_id)
        self.rows.write()  # the row may have been added in this transaction
        # the device could not use the first delivery
        more = {
            "payload_down": Update.c.payload_down + event.payload_bytes,
            "delivered_at": None,
            "changed": self.known.changes,
        }
        self.connection.execute(update(Update).where(*where).values(more))

    def _delivered(self, event: AssignmentDelivered) -> None:
        """Set the time of delivery, once: a delivery reported after a restart is the same one."""
        row = self.rows.find(event.assignment_id)
        if row is not None and not row["update_id"] and row["pulled_at"] is None:
            self.rows.change(row, delivered_at=event.at, pulled_at=event.at)

    def _new_row(self, round_number: int, device: str, assignment_id: str, **values: Any) -> Row:
        self.sums.assign(device)
        return self.rows.new(round_number, device, assignment_id, **values)

    def _replied(self, event: UpdateAccepted | UpdateDropped, outcome: str, **values: Any) -> None:
        """Set a reply's outcome, and copy its columns once.

        The outcome may change later: accepted, then found to be invalid.
        """
        sequence = UpdateId.parse(event.update_id).sequence
        row = self.rows.find(event.assignment_id) or self._new_row(
            event.assignment_round, event.device, event.assignment_id
        )
        self.sums.note_sequence(event.device, sequence)
        if row["update_id"] not in ("", event.update_id):
            return  # a second reply to the same assignment: it stays in the journal only
        shown = PROTECTED_FIELDS if self.facts.protected else event.header.keys()
        header = {name: value for name, value in event.header.items() if name in shown}
        fresh = {} if row["update_id"] else {**columns(header), "update_id": event.update_id}
        if fresh and fresh["pulled_at"] is None:
            del fresh["pulled_at"]  # an earlier aggregator process delivered it, and its event has the time
        if fresh:
            self.sums.add(row["round"], row["device"], wire_down=fresh["wire_down"])
            came = {name: fresh[name] for name in ("payload_up", "wire_up")}
            self.sums.add(event.round, row["device"], arrived=1, **came)
            fresh["payload_up"] += row["payload_up"]  # after the keys and shares of a secure round
            self.sums.run["dense_up"] += self.facts.size * FLOAT_BYTES if event.header.get("parts") else 0
        self._set_outcome(row, outcome, event.at, **fresh, **values)

    def send(self, event: run_events.PhaseClosed, before: Mapping[str, int]) -> None:
        """Add the bytes of a phase's messages to those that its devices sent; `before` were added already."""
        for device, row in self.rows.of_round(event.round).items():
            if more := event.received.get(device, 0) - before.get(device, 0):
                self.sums.add(event.round, device, payload_up=more)
                self.rows.change(row, payload_up=row["payload_up"] + more)

    def _failed(self, event: ClientFailed) -> None:
        row = self.rows.find(event.assignment_id)
        if row is not None and row["outcome"] == "selected":
            if event.is_over:
                self._set_outcome(row, OVER, event.at, reason=event.text)
            else:
                self._set_outcome(row, "failed", event.at, reason=f"{event.kind}: {event.text}", failed_at=event.at)

    def _reconnected(self, event: ClientReconnected) -> None:
        """Set the assignment of a reconnected device to pending again."""
        row = self.rows.find(event.assignment_id)
        if row is not None and row["outcome"] == "failed":
            self._set_outcome(row, "selected", event.at, reason="", failed_at=None)
            self.sums.outcomes[event.device] = ("selected: it had left and is back", event.at)

    def settle(
        self, update_ids: Iterable[str], outcome: str, event: UpdateAggregated | RoundClosed, reason: str = ""
    ) -> int:
        """Set the outcome of updates to aggregated or dropped, or `aggregated-late`; return how many are not late."""
        rows = self.rows.by_update(update_ids)
        for row in rows:
            if outcome == "aggregated":
                how = "aggregated-late" if row["late_reply"] else "aggregated"
                self._set_outcome(row, how, event.at, aggregated_round=event.round)
            elif row["outcome"] != "dropped":
                self._set_outcome(row, "dropped", event.at, reason=reason, aggregated_round=None)
        return sum(row["round"] == event.round for row in rows)

    def cap(self, event: RoundClosed) -> None:
        """Store next to its outcome why an update has less weight than its reply claims, and whether it was chosen."""
        for row in self.rows.by_update({**event.capped, **dict.fromkeys(event.chosen)}):
            said = [CHOSEN] if (update_id := row["update_id"]) in event.chosen else []
            said += [capped_text(event.capped[update_id])] if update_id in event.capped else []
            self.rows.change(row, weight_reason="; ".join(said))

    def forget_metrics(self, event: RoundClosed) -> None:
        """Keep of the round's replies only the metrics that most of its updates carried."""
        for row in self.rows.by_update([*event.aggregated, *event.dropped]):
            kept = {name: value for name, value in row["metrics"].items() if name in event.names}
            if kept.keys() != row["metrics"].keys():
                self.rows.change(row, metrics=kept)

    def clip(self, clipped: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Mark the replies whose metrics were clipped; return the names of these metrics by device."""
        for row in self.rows.by_update(clipped):
            self.rows.change(row, clipped=clipped[row["update_id"]])
        return {UpdateId.parse(update_id).device: names for update_id, names in clipped.items()}

    def _set_outcome(self, row: Row, outcome: str, at: float, **values: Any) -> None:
        """Change the outcome of a row, and update the counts."""
        if row["outcome"] == outcome and "update_id" not in values:
            return  # nothing new
        self.sums.change_outcome(row["round"], row["device"], row["outcome"], outcome, values.get("reason", ""), at)
        self.changed_outcomes[row["round"]].add(row["device"])
        self.rows.change(row, outcome=outcome, **values)
