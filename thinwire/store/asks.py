"""From the events of asks to their rows in `updates`: what was asked, what came of it, and in which round it counts.

Each change of a row is counted in the sums of its round, its client and its run at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select, update

from thinwire.core.events import (
    OVER,
    AskedInFull,
    AskTakenUp,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Event,
    RoundClosed,
    UpdateAccepted,
    UpdateDropped,
    UpdateFolded,
    capped_text,
)
from thinwire.core.types import UpdateId
from thinwire.store.answers import columns
from thinwire.store.sums import Sums
from thinwire.store.tables import Round, Update
from thinwire.store.touched import Row, Rows

FLOAT_BYTES = 4


@dataclass
class Asks:
    """Those of one transaction, which `rows` writes. `size`: the model's, in values."""

    connection: Connection
    run_id: str
    size: int
    sums: Sums
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows(self.connection, self.run_id)

    def apply(self, event: Event) -> None:
        """Take in an event, if it is one of an ask."""
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
        """Asked in the middle of its round: it stands among the round's others from then on."""
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
        self.rows.write()  # the row may be of this transaction
        more = {"payload_down": Update.payload_down + event.payload_bytes, "taken_at": None}  # it was not gone
        self.connection.execute(update(Update).where(*where).values(more))

    def _taken(self, event: AskTakenUp) -> None:
        """The first time counts: what comes after a restart says only that it still is so."""
        row = self.rows.find(event.ask_id)
        if row is not None and not row["update_id"] and row["pulled_at"] is None:
            self.rows.change(row, taken_at=event.at, pulled_at=event.at)

    def _new_row(self, round_number: int, device: str, ask_id: str, **values: Any) -> Row:
        self.sums.ask(device)
        return self.rows.new(round_number, device, ask_id, **values)

    def _answered(self, event: UpdateAccepted | UpdateDropped, outcome: str, **values: Any) -> None:
        """An answer's row: its numbers are taken once, its outcome may change (accepted, then found to be bad)."""
        sequence = UpdateId.parse(event.update_id).sequence
        row = self.rows.find(event.ask_id) or self._new_row(event.asked_round, event.device, event.ask_id)
        self.sums.saw(event.device, sequence)
        if row["update_id"] not in ("", event.update_id):
            return  # another answer to an ask that has one: it stays in the journal
        fresh = {} if row["update_id"] else {**columns(event.head), "update_id": event.update_id}
        if fresh and fresh["pulled_at"] is None:
            del fresh["pulled_at"]  # another aggregator handed it out, and said so
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
        """Its answer is waited for again."""
        row = self.rows.find(event.ask_id)
        if row is not None and row["outcome"] == "failed":
            self._turn(row, "asked", event.at, reason="", failed_at=None)
            self.sums.outcomes[event.device] = ("asked: it had left and is back", event.at)

    def settle(
        self, update_ids: Iterable[str], outcome: str, event: UpdateFolded | RoundClosed, reason: str = ""
    ) -> None:
        """Folded or dropped: late answers that were folded are called late."""
        for row in self.rows.by_update(update_ids):
            if outcome == "folded":
                self._turn(row, "late" if row["late_answer"] else "folded", event.at, folded_round=event.round)
            elif row["outcome"] != "dropped":
                self._turn(row, "dropped", event.at, reason=reason, folded_round=None)

    def cap(self, event: RoundClosed) -> None:
        """Say of updates that count less than their replies say why, beside their outcome."""
        for row in self.rows.by_update(event.capped):
            self.rows.change(row, reason=capped_text(event.capped[row["update_id"]]))

    def forget_metrics(self, event: RoundClosed) -> None:
        """Keep of the round's answers only the metrics that most of its updates carried."""
        for row in self.rows.by_update([*event.folded, *event.dropped]):
            kept = {name: value for name, value in row["metrics"].items() if name in event.names}
            if kept.keys() != row["metrics"].keys():
                self.rows.change(row, metrics=kept)

    def clip(self, clipped: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Mark the answers whose metrics were clipped; gives the same by device."""
        for row in self.rows.by_update(clipped):
            self.rows.change(row, clipped=clipped[row["update_id"]])
        return {UpdateId.parse(update_id).device: names for update_id, names in clipped.items()}

    def _turn(self, row: Row, outcome: str, at: float, **values: Any) -> None:
        """Give a row its outcome, and count it there instead of where it was."""
        if row["outcome"] == outcome and "update_id" not in values:
            return  # said before
        self.sums.turn(row["round"], row["device"], row["outcome"], outcome, values.get("reason", ""), at)
        self.rows.change(row, outcome=outcome, **values)
