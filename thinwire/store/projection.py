"""From events to the tables that are read: what the journal says, laid out to be shown.

A law: after any number of events each count and each sum of bytes in `rounds`, `clients` and `runs` equals that
over the rows of `updates`; a run's bytes have beside them those of measuring its last model. An event that tells
nothing new (a fold repeated after a restart) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select

from thinwire.core.events import (
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
)
from thinwire.store.asks import FLOAT_BYTES, Asks
from thinwire.store.sums import Sums
from thinwire.store.tables import Checkpoint, Round, Run

MOMENTS = {"running": "started_at", "done": "finished_at", "failed": "finished_at", "stopped": "finished_at"}


@dataclass(frozen=True)
class Facts:
    """What never changes about a run."""

    run_id: str
    size: int
    metric: str


@dataclass
class Projection:
    """The events of one transaction, with those of asks (store/asks.py); `finish` writes what they add up to."""

    connection: Connection
    facts: Facts
    sums: Sums = field(init=False)
    asks: Asks = field(init=False)

    def __post_init__(self) -> None:
        self.sums = Sums(self.connection, self.facts.run_id)
        self.asks = Asks(self.connection, self.facts.run_id, self.facts.size, self.sums)

    def apply(self, event: Event) -> None:
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
        self.asks.rows.write()
        self.sums.write()

    def _run(self, **values: Any) -> None:
        self.sums.of_run.update(values)

    def _round(self, number: int, **values: Any) -> None:
        self.sums.of_rounds[number].update(values)

    def _status(self, event: RunStatusChanged) -> None:
        self._run(status=event.status, status_text=event.text, exit_code=event.exit_code)
        if moment := MOMENTS.get(event.status):
            self.sums.of_run.setdefault(moment, event.at)  # the first one counts

    def _noted(self, text: str, instead_of: str = "") -> None:
        """One sentence more; the last one counts of those that begin alike."""
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
        """Nobody was there for a while in the middle of this round."""
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
        if event.names or event.ignored:  # neither stands in older journals
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
