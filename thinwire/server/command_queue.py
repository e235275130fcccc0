"""The commands that people leave for the service, as rows of the store; each is answered when it has taken effect.

The service reads them for all runs, and so does the driver of each run. `RecordingFleet` carries out those about
devices and about runs without a driver.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.core.errors import ThinwireError, Unreachable
from thinwire.server.context import StopCommand
from thinwire.store import CommandRow, Commands

COMMANDS_READ_S = 0.2  # shortest period between two reads of the commands


class CommandQueue:
    """The service's view of `store.commands`; a command is answered when it has taken effect."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._read_at = 0.0
        self._open: list[CommandRow] = []
        self._ending = self._is_stopping = False
        self._paused = set[str]()

    def _pending(self) -> list[CommandRow]:
        """Return the unanswered commands, read from the store at most every COMMANDS_READ_S seconds.

        While the database does not answer, they are those of the last read.
        """
        if time.monotonic() - self._read_at >= COMMANDS_READ_S:
            with contextlib.suppress(Unreachable):
                self._open = self._commands.pending()
            self._read_at = time.monotonic()
        return self._open

    def stop_service(
        self, answering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    ) -> bool:
        """Return True if a person commanded the service to end; once True it stays True.

        The command is answered in the context `answering`.
        """
        found = () if self._ending else self.about_runs("stop-service")
        if found or self._is_stopping:
            self._is_stopping = True  # an answer that raises may be written all the same
            with answering():
                for command in found:
                    self.answer(command, {})
            self._ending = True
        return self._ending

    def stop_command(self, run_id: str) -> StopCommand:
        """Return how a person stops this run, by the unanswered commands."""
        kinds = {command.kind for command in self._pending() if command.run_id == run_id}
        return "run" if "stop-run" in kinds else "after-round" if "stop-after-round" in kinds else None

    def paused(self, run_id: str) -> bool:
        """Return True between a command to pause this run and the next one to resume it.

        The first call that sees a command returns its effect, and the next call answers it: by then the driver has
        recorded the effect.
        """
        kinds = {"pause-run": self._paused.add, "resume-run": self._paused.discard}
        if found := next((one for one in self._pending() if one.run_id == run_id and one.kind in kinds), None):
            if (run_id in self._paused) == (found.kind == "pause-run"):
                self.answer(found, {})
            else:
                kinds[found.kind](run_id)
        return run_id in self._paused

    def unpause(self, run_id: str) -> None:
        """Forget that this run was paused, because a driver of it begins."""
        self._paused.discard(run_id)

    def refuse_resume(self, run_id: str, error: ThinwireError) -> None:
        """Answer the command to resume this run with a refusal: the run stays paused."""
        self._paused.add(run_id)
        for command in [one for one in self._pending() if (one.kind, one.run_id) == ("resume-run", run_id)]:
            self.answer(command, error.as_result())

    def revocations(self) -> list[CommandRow]:
        """Return the unanswered commands to revoke a device; `answer` answers one."""
        return [command for command in self._pending() if command.kind == "revoke"]

    def answer(self, command: CommandRow, result: Mapping[str, Any]) -> None:
        """Answer a command with its result."""
        self._commands.answer(command.id, {"done": True, **result})
        self._open = [other for other in self._open if other.id != command.id]

    def about_runs(self, *kinds: str) -> list[CommandRow]:
        """Return the unanswered commands of these kinds; `answer` answers one."""
        return [command for command in self._pending() if command.kind in kinds]

    def answer_all(self, kind: str, run_id: str) -> bool:
        """Answer all commands of this kind for this run; return True if there was one."""
        found = [command for command in self._pending() if command.kind == kind and command.run_id == run_id]
        for command in found:
            self.answer(command, {})
        return bool(found)
