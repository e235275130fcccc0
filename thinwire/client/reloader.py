"""Reload the tasks' code and the owner's policy between two assignments, if the owner requested it.

`thinwire client reload` sends a signal, whose handler sets an event. `Loop` (client/loop.py) then calls
`Reloader.reload`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.client.admission import AdmissionController
from thinwire.client.calls import Say
from thinwire.client.errors import CannotReply
from thinwire.client.executor import Worker
from thinwire.client.policy import Policy
from thinwire.client.train.errors import Cancelled
from thinwire.core.errors import ThinwireError


class Reloader:
    """The reloader of a client, called between two assignments.

    `requested` is set by `thinwire client reload`; `reread` returns the owner's policy from its file.

    Invariant: an error in the new code or policy does not end the client. It keeps its former policy, and assignments
    fail with the error of the code.
    """

    def __init__(
        self,
        admission: AdmissionController,
        worker: Worker | None = None,
        requested: threading.Event | None = None,
        reread: Callable[[], Policy] | None = None,
    ) -> None:
        self.admission, self.worker = admission, worker
        self.requested, self._reread = requested or threading.Event(), reread

    def reload(self, say: Say) -> None:
        """Read the owner's policy again, then import the tasks again."""
        self.requested.clear()
        self._reload_policy(say)
        self.reload_tasks(say)

    def _reload_policy(self, say: Say) -> None:
        if self._reread is None:
            return
        try:
            policy = self._reread()
        except ThinwireError as error:
            say(f"the policy stays as it was: {error}")
            return
        if policy != self.admission.policy:
            self.admission.set_policy(policy)
            say(f"the policy is another one now: {policy.digest}")

    def reload_tasks(self, say: Say) -> None:
        """Import the tasks again."""
        if self.worker is None:
            return
        say("importing the tasks again")
        try:
            self.worker.restart()
        except (ThinwireError, CannotReply, ImportError, Cancelled) as error:  # the next assignment tries again
            say(f"the tasks are not imported: {error}")
            return
        for task in self.worker.manifests:
            if not task.report.error:
                say(f"the task {task.name} is {task.version} {task.source_digest[:12]}".replace("  ", " "))
