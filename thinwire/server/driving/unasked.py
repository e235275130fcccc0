"""Whom a round can ask in its middle: who is there, able, idle and not asked in it, first those that it has drawn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence

from thinwire.core.ask_ids import ask_id_of
from thinwire.core.events import RoundOpened
from thinwire.server.choices.spares import in_time, who_could_answer
from thinwire.server.driving.running import Running
from thinwire.server.moves import Spare


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
