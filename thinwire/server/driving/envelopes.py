"""An ask as it leaves for one device: on the newest model, or once more as it was."""

from __future__ import annotations

from dataclasses import replace

from thinwire.core.ask_ids import asked_round
from thinwire.core.fleet import Envelope
from thinwire.core.types import Ask, AskKind, Verdict
from thinwire.server.choices.clipping import work_of
from thinwire.server.driving.running import Running


def envelope(
    running: Running, device: str, ask_id: str, kind: AskKind, round_number: int, deadline_s: float
) -> Envelope:
    """An ask on the newest model for one device, with its verdicts and what it needs of the model."""
    base, parcel = running.past.bases.newest, running.sending.parcel(device, but=ask_id)
    asked_in = running.past.codecs.of(round_number, device) if kind == "train" else ""
    ask = Ask(
        ask_id=ask_id,
        run=running.run_id,
        task=running.plan.run.task,
        kind=kind,
        plan=running.holders.plan_for(device, running.presence.hellos.get(device)),
        round=round_number,
        base_version=base.version,
        base_digest=base.digest,
        layout_digest=running.task_layout.digest,
        codec=asked_in or running.codec,
        work=work_of(running.plan, _side_by_side(running, round_number, kind), running.past.paces.work(device, ask_id)),
        deadline_s=deadline_s,
        parts=parcel.parts,
        references_from=running.past.references_from,
        verdicts=verdicts_of(running, device, ask_id if running.past.delay else ""),
        further=running.past.goes_on(ask_id),
        identity=running.identity,
    )
    return Envelope(device, ask, running.sending.bundle(parcel))


def verdicts_of(running: Running, device: str, ask_id: str = "") -> tuple[Verdict, ...]:
    """What a device is told of its last updates; with an ask that is named, what it was told then."""
    return running.past.told.of(device, running.plan.cohort.max_staleness + running.past.delay + 2, ask_id)


def envelope_again(running: Running, device: str, ask_id: str) -> Envelope:
    """What a device was asked in another round and has not answered, for a fleet that knows nothing of it."""
    number = asked_round(ask_id)
    base, had_s = running.past.bases.of(number), running.past.had_s(device, number)
    parcel, made = running.sending.whole(base), envelope(running, device, ask_id, "train", number, had_s)
    asked = replace(made.ask, base_version=base.version, base_digest=base.digest, parts=parcel.parts)
    return Envelope(device, asked, running.sending.bundle(parcel))


def _side_by_side(running: Running, number: int, kind: AskKind) -> int:
    """How many updates are put together with the one that is asked for."""
    if running.plan.cohort.mode == "buffered":
        return running.plan.cohort.buffer
    return running.past.drawn.get(number, 0) if kind == "train" else 0
