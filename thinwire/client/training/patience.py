"""How long the process that trains is waited for: while it has time left, or gives a sign of life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.client.compute.errors import Cancelled
from thinwire.client.training.child import Broken, Child

if TYPE_CHECKING:
    from thinwire.client.compute.order import Tell

LOOK_S = 0.1  # between two looks whether the ask was withdrawn
LETS_GO_S = 5.0  # from hearing that the ask was withdrawn to the end of the batch
HUNG_S = 60.0  # past the deadline without a sign of life
MOST_TWICE = 10


@dataclass(frozen=True)
class Until:
    """A deadline on a worker's clock, and how long it was away when the work began."""

    at: float
    had_s: float


class Patience:
    """Of one worker. `hung_s` is what it has at least, past its deadline, without a sign of life.

    Law: who hangs is ended at the latest `hung_s`, or once more the time it had, past its deadline. After each that
    hung the next one has twice as long: what is only slow comes to an end some time.
    """

    def __init__(self, hung_s: float, clock: Callable[[], float]) -> None:
        self.hung_s, self._clock, self._hung = hung_s, clock, 0

    def until(self, left_s: float | None) -> Until | None:
        return None if left_s is None else Until(self._clock() + left_s, left_s)

    def rewarded(self) -> None:
        """It has come to an end."""
        self._hung = 0

    def heard(
        self, child: Child, tell: Tell, cancelled: Callable[[], bool], until: Until | None, number: int = 0
    ) -> dict[str, Any]:
        """What it says when it is done with order `number`; meanwhile its progress is told on, and its time runs.

        `Cancelled`: it did not let go of what was withdrawn; `Broken`: it hung. Either way it was ended.
        """
        alive_at, told_at = self._clock(), None
        while True:
            head, now = child.hear(LOOK_S), self._clock()
            if head is not None:
                if "told" not in head:
                    return head
                with child.held_to_account():
                    what, done, total = head["told"]
                    tell(str(what), int(done), int(total))
                alive_at = now
            if told_at is None and cancelled():
                told_at = now
                child.send({"do": "cancel", "id": number})
            if told_at is not None and now - told_at > LETS_GO_S:
                child.kill()
                raise Cancelled
            if until is not None and now - max(until.at, alive_at) > self._for_s(until):
                child.kill()
                self._hung += 1
                raise Broken(f"hung: {now - alive_at:.0f} s without a sign of life, and past the deadline")

    def _for_s(self, until: Until) -> float:
        return max(self.hung_s, until.had_s) * 2.0 ** min(self._hung, MOST_TWICE)
