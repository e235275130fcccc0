"""Who is there and able and was not asked in this round: kept from one look for spares to the next."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from thinwire.server.running import Running


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
