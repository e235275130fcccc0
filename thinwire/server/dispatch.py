"""An ask as it leaves for one device: on the newest model, or once more as it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from thinwire.core.events import RoundOpened
from thinwire.core.fleet import Envelope
from thinwire.core.types import Ask, AskKind, Verdict, ask_id_of, asked_round
from thinwire.server.context import Running
from thinwire.server.policy.cohort import in_time, who_could_answer
from thinwire.server.policy.local_work import work_of
from thinwire.server.round_events import Spare


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


# Whom a round can ask in its middle: who is there, able, idle and not asked in it, first those that it has drawn.


class Others:
    """Spares for the machine of one round; `asks` are the machine's own, device -> ask_id."""

    def __init__(self, running: Running, opened: RoundOpened, asks: Mapping[str, str]) -> None:
        self._running, self._opened, self._asks = running, opened, asks
        self._drawn = deque(opened.later)  # whom it asks first when a place is free
        self._unasked = Unasked(running)

    def in_time(self, left_s: float) -> Iterator[Spare]:
        """Those that can answer within so many seconds: looked for only where one is needed."""
        running, past, opened = self._running, self._running.past, self._opened
        if past.delay:
            return  # a device that is there works on the rounds ahead, from a newer version
        while self._drawn and self._drawn[0] in self._asks:
            self._drawn.popleft()
        terms = left_s, past.took, opened.deadline_s
        for device in in_time(self._drawn, *terms):
            if device not in past.owed.busy and running.able(device):
                yield self._spare(device)
        drawn = set(self._drawn)
        idle = (
            device
            for device in self._unasked.now(self._asks)
            if running.able(device) and not (device in past.owed.busy or device in drawn)
        )
        for device in who_could_answer(idle, *terms, running.plan.run.seed, opened.round):
            yield self._spare(device)

    def _spare(self, device: str) -> Spare:
        return Spare(device, ask_id_of(self._running.run_id, self._opened.round, device))


class Unasked:
    """While answers lack, a round looks for spares at each event: who is there is gone through again only when somebody
    joined or may be asked again since, so that a round's looks do not grow with the square of its devices.
    """

    def __init__(self, running: Running) -> None:
        self._running, self._able = running, list[str]()
        self._joined, self._until_s = -1, -math.inf  # for how many joined, and until when, `_able` is all there are

    def now(self, asked: Container[str]) -> Sequence[str]:
        """All who are able, not asked, and there or gone since; `asked` only grows. They may be busy."""
        presence, elapsed_s = self._running.presence, self._running.elapsed
        if self._joined != presence.joined or elapsed_s >= self._until_s:
            self._joined, self._until_s = presence.joined, self._running.past.barred.same_until(elapsed_s)
            self._able = [device for device in presence.hellos if self._running.able(device)]
        self._able = [device for device in self._able if device not in asked]
        return self._able
