"""What a device keeps of all runs of one task: the state of each as it is on disk, and what is still to be sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from thinwire.client import outbox
from thinwire.client.answering.job import Say
from thinwire.client.disk.state import NOT_KNOWN, STATE, RunFolder, RunState
from thinwire.client.disk.until_exit import WaitingFolder
from thinwire.client.failures import CannotAnswer
from thinwire.core.errors import DataLost
from thinwire.core.types import Ask, Failure, ReplyHead

Reply = ReplyHead | Failure
MAX_OPEN_RUNS = 4  # of a task, not over: an aggregator has devices work on one run at a time
MAX_ENDED_RUNS = 64  # of a task, of which the disk keeps the sequence: who comes back to an older one says hello first


class KeptRuns:
    """Runs by id, in `folders(FOLDER, RUN)` each. `seen`: the highest sequence of each that the aggregator has seen;
    `identities`: of the runs that it counted them in.

    Invariant: however many runs an aggregator names, disk and memory hold `MAX_OPEN_RUNS` of a task with all that they
    keep, and of `MAX_ENDED_RUNS` others the sequence. Two threads may call it.
    """

    def __init__(self, folder: Path, folders: Callable[[Path, str], RunFolder]) -> None:
        self.seen: dict[str, int] = {}
        self.identities: dict[str, str] = {}
        self._folder, self._folders = folder, folders
        self._runs: dict[str, tuple[RunFolder, RunState]] = {}
        self._lock = threading.RLock()

    def __getitem__(self, run: str) -> tuple[RunFolder, RunState]:
        """What was opened or kept before; KeyError where nothing was."""
        return self._runs[run]

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    @property
    def held_bytes(self) -> int:
        """Of all vectors in memory."""
        return sum(state.nbytes for _, state in self._runs.values())

    def opened(self, run: str, say: Say, identity: str | None = None) -> tuple[RunFolder, RunState]:
        """Its state, from the disk at first; one that is older than what was sent begins anew.

        So does one of another run with the same id, whose `identity` differs: nothing of it is sent into this one.
        """
        with self._lock:
            return self._opened(run, say, identity)

    def _opened(self, run: str, say: Say, identity: str | None) -> tuple[RunFolder, RunState]:
        if run not in self._runs:
            try:
                folder = self._folders(self._folder, run)
            except DataLost as error:
                raise CannotAnswer("protocol", error.what) from error
            state, said = folder.load()
            is_same = not state.identity or self.identities.get(run, state.identity) == state.identity
            if (seen := self.seen.get(run, 0)) > state.sequence and is_same:
                said.append(f"{run}: {seen} answers were sent, and this disk knows of {state.sequence}; it begins anew")
                why = state.lost or ("older" if state.sequence else "missing")
                state = RunState(seen, lost=why, references_from=NOT_KNOWN)
            for line in said:
                say(line)
            self._runs[run] = folder, state
        folder, state = self._runs[run]
        if identity is not None and not (state.outbox or state.nbytes):  # an ask, by which it may come to hold more
            self._give_up_oldest(run, say)
            self._forget_ended(run, say)
        if identity is not None and identity != state.identity:
            if state.sequence and not (state.lost and not state.identity):  # of what was lost it is not known whose
                say(f"{run}: another run of this name; what this disk holds of the earlier one is not sent")
                seen = self.seen.get(run, 0)
                state = RunState(seen, lost="missing" if seen else "", references_from=NOT_KNOWN if seen else 0)
            self._runs[run] = folder, replace(state, identity=identity)
        return self._runs[run]

    def keep(self, ask: Ask, folder: RunFolder, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        """Durable from here on, or until `save` where the plan lets it wait; a simulation's folders know better."""
        local = {} if isinstance(ask.plan, str) else ask.plan.get("local", {})
        if local.get("durability") == "exit" and isinstance(folder, WaitingFolder):
            folder.hold(state, parts)
        else:
            folder.commit(state, parts)
        self._runs[ask.run] = folder, state

    def over(self, run: str, say: Say, identity: str = "") -> bool:
        """Keep no more than the sequence of a run that has ended; False where another run is kept under this id.

        A run of which this disk holds nothing is forgotten without a write: its sequence is 0.
        """
        try:
            if not self._folders(self._folder, run).folder.exists():
                self._runs.pop(run, None)
                return True
            folder, state = self.opened(run, say)
            if state.identity and identity != state.identity:
                say(f"{run}: another run of this name is over; what this disk holds of its own one is kept")
                return False
            state = outbox.over(state)
            folder.commit(state)
            self._runs[run] = folder, state
        except (CannotAnswer, DataLost) as error:  # what is left on disk does no harm, and other runs go on
            say(str(error))
        else:
            say(f"{run} is over")
            self._forget_ended(run, say)
        return True

    def _give_up_oldest(self, run: str, say: Say) -> None:
        """Keep of the task's oldest runs that are not over no more than the sequence, where `run` is one too many."""
        full = [path for path in self._others(run) if any(file.name != STATE for file in path.iterdir())]
        for path in full[: max(0, len(full) - MAX_OPEN_RUNS + 1)]:
            try:
                if path.name in self._runs:
                    folder, state = self._runs.pop(path.name)
                else:
                    folder = self._folders(self._folder, path.name)
                    state = folder.load()[0]
                folder.commit(replace(outbox.over(state), lost="given-up", references_from=NOT_KNOWN))
            except (DataLost, OSError) as error:
                say(str(error))
            else:
                say(f"{path.name}: {MAX_OPEN_RUNS} newer runs are not over; what was kept of this one is given up")

    def _forget_ended(self, run: str, say: Say) -> None:
        """Remove what is left of the task's oldest runs that keep a sequence and owe nothing, but for the newest, and
        forget those of which nothing is kept at all.
        """
        with self._lock:
            for name, (_, state) in list(self._runs.items()):
                if name != run and not state.nbytes and replace(state, identity="") == RunState():
                    del self._runs[name]
            ended = [path for path in self._others(run) if all(file.name == STATE for file in path.iterdir())]
            for path in ended[: max(0, len(ended) - MAX_ENDED_RUNS)]:
                try:
                    if path.name in self._runs:
                        _, state = self._runs[path.name]
                    else:
                        state = self._folders(self._folder, path.name).load()[0]
                    if state.outbox or state.nbytes:
                        continue
                    (path / STATE).unlink(missing_ok=True)
                    path.rmdir()
                except (DataLost, OSError) as error:  # it does no harm, and is tried again
                    say(f"{path.name} cannot be removed: {error}")
                else:
                    self._runs.pop(path.name, None)

    def _others(self, run: str) -> list[Path]:
        """Return the folders of the task's other runs, the one that was written longest ago first."""
        task = run.rpartition("-")[0]
        folders = [path for path in (self._folder / "runs").glob("*") if path.name.rpartition("-")[0] == task]
        return sorted((path for path in folders if path.name != run), key=lambda path: path.stat().st_mtime_ns)

    def save(self, say: Say) -> None:
        """Make durable what plans let wait: at the exit, and from time to time before it."""
        for folder, _ in list(self._runs.values()):
            if isinstance(folder, WaitingFolder):
                try:
                    folder.save()
                except (DataLost, OSError) as error:
                    say(f"{folder.folder.name}: what waits to be saved cannot be: {error}")

    def unsent(self, task: str, say: Say) -> list[tuple[ReplyHead, Path | None]]:
        """Everything of a task's runs on disk on which there is no verdict yet: what a new process sends again."""
        found = []
        for path in sorted((self._folder / "runs").glob("*/state.json")):
            if path.parent.name.rpartition("-")[0] != task:  # a run's id is TASK-N: another session's
                continue
            folder, state = self.opened(path.parent.name, say)
            found += [(entry.head, folder.path(entry)) for entry in state.outbox]
        return found

    def delivered(self, reply: Reply) -> None:
        """The other end has it. What no verdict will come on goes, and from the disk at once where it is large."""
        if not isinstance(reply, ReplyHead):
            return
        with self._lock:
            if reply.update_id.run not in self._runs:
                return
            folder, state = self._runs[reply.update_id.run]
            after = outbox.delivered(state, reply)
            self._runs[reply.update_id.run] = folder, after
        if after is not state and reply.parts:
            with contextlib.suppress(DataLost):  # a full disk: it goes with the next commit
                folder.settle(after)
