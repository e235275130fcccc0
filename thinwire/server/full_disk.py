"""A full disk pauses all runs: the service stays up, says so, and goes on when there is space.

A driver writes first and acts then (journal first), so it can wait in the middle of a write: `RunFleet.wait_for_disk`
suspends it, and the write is made again. No driver gets a turn meanwhile, and the clock of all runs stands still.
Nothing is decided and nothing is lost: replies that arrive stay in the mailboxes, and an upload that the disk does not
take is sent again by its device.

Without a reserve (simulations, tests) `NotWritten` is raised as before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thinwire.core.clock import StoppableClock
from thinwire.core.disk_reserve import Reserve
from thinwire.core.errors import NotWritten
from thinwire.core.events import Event
from thinwire.core.run_events import DiskFilled, DiskFreed
from thinwire.store import Store

LOOK_S = 2.0  # period of the check whether there is space again


@dataclass
class FullDisk:
    """Knows whether the disk is full. `closing` returns True once the service ends."""

    store: Store
    clock: StoppableClock
    reserve: Reserve | None
    closing: Callable[[], bool]
    is_full: bool = False
    looked_at: float = -math.inf

    def fill_up(self, error: NotWritten) -> None:
        """Pause all runs because a write failed; raise `error` without a reserve, or if the service ends."""
        if self.reserve is None or self.closing():
            raise error
        if self.is_full:
            return
        self.is_full, self.looked_at = True, self.clock.inner.now()
        self.clock.stop()
        with self.reserve.released():
            self.reserve.mark(str(error))
            self._record(DiskFilled(self.clock.wall(), str(error)))

    def look(self) -> None:
        """Let all runs go on if the disk has space again; look at most every LOOK_S seconds."""
        if not self.is_full or self.reserve is None or self.clock.inner.now() - self.looked_at < LOOK_S:
            return
        self.looked_at = self.clock.inner.now()
        if self.reserve.has_space():
            self.is_full = False
            self._record(DiskFreed(self.clock.wall(), self.clock.go_on()))
            self.reserve.unmark()

    @contextlib.contextmanager
    def with_reserve(self) -> Iterator[None]:
        """Let the block use the reserve if the disk is full, to delete what makes space."""
        if self.is_full and self.reserve is not None:
            with self.reserve.released():
                yield
        else:
            yield

    def _record(self, event: Event) -> None:
        """Journal an event; the flag says the same if even that fails."""
        with contextlib.suppress(NotWritten):
            self.store.record_own(event)
