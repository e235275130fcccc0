"""This module builds the envelopes of assignments, and finds candidates for replacements in a round.

An envelope carries the newest model version, the outcomes of the device's last updates, and the work to do. It is built
for the first time, or again for an assignment that the fleet does not know after a restart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from thinwire.core.events import RoundOpened
from thinwire.core.fleet import Envelope
from thinwire.core.types import Ask, AskKind, Verdict, ask_id_of, asked_round
from thinwire.server.context import RunContext
from thinwire.server.policy.cohort import in_time, who_could_answer
from thinwire.server.policy.local_work import work_of
from thinwire.server.round_events import Replacement


def envelope(
    running: RunContext, device: str, ask_id: str, kind: AskKind, round_number: int, deadline_s: float
) -> Envelope:
    """Return an assignment on the newest model version for one device.

    It carries the outcomes of the device's updates and the parts of the model that the device needs.
    """
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


def verdicts_of(running: RunContext, device: str, ask_id: str = "") -> tuple[Verdict, ...]:
    """Return the outcomes of the device's last updates.

    If `ask_id` is named, return the outcomes that this assignment carried when it was sent first.
    """
    return running.past.told.of(device, running.plan.cohort.max_staleness + running.past.delay + 2, ask_id)


def envelope_again(running: RunContext, device: str, ask_id: str) -> Envelope:
    """Rebuild the unanswered assignment of another round, for a fleet that does not know it after a restart."""
    number = asked_round(ask_id)
    base, had_s = running.past.bases.of(number), running.past.had_s(device, number)
    parcel, made = running.sending.whole(base), envelope(running, device, ask_id, "train", number, had_s)
    asked = replace(made.ask, base_version=base.version, base_digest=base.digest, parts=parcel.parts)
    return Envelope(device, asked, running.sending.bundle(parcel))


def _side_by_side(running: RunContext, number: int, kind: AskKind) -> int:
    """Return the number of updates that are aggregated together with the one of this assignment."""
    if running.plan.cohort.mode == "buffered":
        return running.plan.cohort.buffer
    return running.past.drawn.get(number, 0) if kind == "train" else 0


class ReplacementSource:
    """Candidates for replacements in one round: connected, able and idle devices that are not selected in it.

    `asks` is the state machine's own mapping of device to `ask_id`.
    """

    def __init__(self, running: RunContext, opened: RoundOpened, asks: Mapping[str, str]) -> None:
        self._running, self._opened, self._asks = running, opened, asks
        self._drawn = deque(opened.later)  # sampled at the opening: selected first when a slot is free
        self._unasked = ReplacementPool(running)

    def in_time(self, left_s: float) -> Iterator[Replacement]:
        """Yield the candidates that can reply within `left_s` seconds, first those that the round sampled at its
        opening.

        The search runs lazily, so a round that needs no replacement pays nothing.
        """
        running, past, opened = self._running, self._running.past, self._opened
        if past.delay:
            return  # connected devices work on later pipelined rounds already, from a newer version
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

    def _spare(self, device: str) -> Replacement:
        """Return the device as a candidate, with its `ask_id` in this round."""
        return Replacement(device, ask_id_of(self._running.run_id, self._opened.round, device))


class ReplacementPool:
    """Connected and able devices that are not selected in the round, cached between calls.

    While replies are missing, a round looks for replacements at each event. All connected devices are examined again
    only if a device joined since, or may be selected again since. Otherwise the cost of a round would grow with the
    square of its devices.
    """

    def __init__(self, running: RunContext) -> None:
        self._running, self._able = running, list[str]()
        self._joined, self._until_s = -1, -math.inf  # `_able` is complete for this count and until this time

    def now(self, asked: Container[str]) -> Sequence[str]:
        """Return the able devices that are not in `asked`; some of them may be busy or disconnected by now.

        `asked` may only grow from call to call.
        """
        presence, elapsed_s = self._running.presence, self._running.elapsed
        if self._joined != presence.joined or elapsed_s >= self._until_s:
            self._joined, self._until_s = presence.joined, self._running.past.barred.same_until(elapsed_s)
            self._able = [device for device in presence.hellos if self._running.able(device)]
        self._able = [device for device in self._able if device not in asked]
        return self._able
