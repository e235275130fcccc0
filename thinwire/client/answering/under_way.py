"""What stands between an ask that was trained for and its answer, while the next one may be begun."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.client.answering.job import Job
from thinwire.client.answering.work import Trained
from thinwire.client.disk.state import RunState
from thinwire.core.types import Failure


@dataclass(frozen=True)
class Begun:
    """An ask that was trained for, or failed: what is left is to settle its verdicts, encode, commit and send.

    `at`, on the session's clock, is when it began to wait for that.
    """

    job: Job
    outcome: Trained | Failure
    at: float


@dataclass
class Ahead:
    """Where the next training of a run starts while earlier answers are still being encoded.

    `state` is None when no answer is: then the committed state counts. `making`: asks that were begun and not finished.
    `void`: sequences of changes that could not be encoded; the thread that finishes replaces the set, so that the one
    that trains may go through it meanwhile.
    """

    state: RunState | None = None
    making: set[str] = field(default_factory=set)
    void: frozenset[int] = frozenset()

    @property
    def sequence(self) -> int:
        return self.state.sequence if self.state is not None else 0
