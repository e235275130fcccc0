"""What a service looks after between two asks: a fresh process where its owner wishes one, the policy as it is now."""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.client.answering.job import Say
from thinwire.client.compute.errors import Cancelled
from thinwire.client.failures import CannotAnswer
from thinwire.client.owner.gate import Gate
from thinwire.client.policy import Policy
from thinwire.client.training.worker import Worker
from thinwire.core.errors import ThinwireError


class Upkeep:
    """`wished` is set by `thinwire client reload`; `reread` gives the owner's policy as its file is now.

    Law: whatever is wrong with the new code or the new policy, the service goes on: with the policy that it had, and
    with asks that fail by the code's error.
    """

    def __init__(
        self,
        gate: Gate,
        worker: Worker | None = None,
        wished: threading.Event | None = None,
        reread: Callable[[], Policy] | None = None,
    ) -> None:
        self.gate, self.worker = gate, worker
        self._wished, self._reread = wished or threading.Event(), reread

    def look(self, say: Say) -> None:
        """Between two asks, in the thread that works."""
        if self._wished.is_set():
            self._wished.clear()
            self._reload_policy(say)
            self._reload_tasks(say)
        if self.worker is not None:
            self.worker.rest()

    def _reload_policy(self, say: Say) -> None:
        if self._reread is None:
            return
        try:
            policy = self._reread()
        except ThinwireError as error:
            say(f"the policy stays as it was: {error}")
            return
        if policy != self.gate.policy:
            self.gate.renew(policy)
            say(f"the policy is another one now: {policy.digest}")

    def _reload_tasks(self, say: Say) -> None:
        if self.worker is None:
            return
        say("importing the tasks anew")
        try:
            self.worker.anew()
        except (ThinwireError, CannotAnswer, ImportError, Cancelled) as error:  # the next ask tries it again
            say(f"the tasks cannot be imported: {error}")
            return
        for line in self.worker.changed:
            say(line)
        for task in self.worker.described:
            if not task.report.error:
                say(f"the task {task.name} is {task.version} {task.source_digest[:12]}".replace("  ", " "))
