"""Keep what a device has on disk: the state of each run (`RunStore`), resolved plans (`PlanStore`), and its deletion.

`PlanStore` keeps resolved plans under digests that this device computed itself, so an assignment carries 64 characters
instead of the plan. Invariant: a plan is never used under a digest that is not its own. A file is hashed when it is
read, and a plan in an assignment is hashed as received. When the device leaves, `delete_learned` deletes everything in
the client's folder that was made from local data or may quote it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.client import outbox
from thinwire.client.calls import Say
from thinwire.client.errors import CannotReply
from thinwire.client.personal_files import FOLDER as PERSONAL
from thinwire.client.personal_files import save_values, saved_values
from thinwire.client.run_state import NOT_KNOWN, RUN_ID, STATE, ClientRunState, RunFolder, Write, WriteBehindRunFolder
from thinwire.core.errors import DataLost, ThinwireError
from thinwire.core.formatting import counted
from thinwire.core.plan import RunPlan, canonical, digest_of
from thinwire.core.protocol import BYTES_A_TOKEN, require_small
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.core.types import Assignment, Reply, ReplyHeader

MAX_OPEN_RUNS = 4  # of one task, not over: as many as an aggregator's default max_runs
MAX_ENDED_RUNS = 64  # of one task, whose sequence stays on disk; for an older run the `Welcome` has it


class RunStore:
    """The runs of one task by id, each in its folder `folders(FOLDER, RUN)`.

    `seen` is the highest sequence that the aggregator has seen of each run, and `identities` are the runs in which it
    counted them. `most` returns how many runs of the task the owner allows (`max_runs` of client.toml).

    Invariant: however many runs an aggregator names, disk and memory hold the full state of at most `most()` of
    a task. Of at most `MAX_ENDED_RUNS` others they hold the sequence. Two threads may call this class.
    """

    def __init__(
        self, folder: Path, folders: Callable[[Path, str], RunFolder], most: Callable[[], int] = lambda: MAX_OPEN_RUNS
    ) -> None:
        self.seen: dict[str, int] = {}
        self.identities: dict[str, str] = {}
        self._folder, self._folders, self._most = folder, folders, most
        self._runs: dict[str, tuple[RunFolder, ClientRunState]] = {}
        self._lock = threading.RLock()

    def __getitem__(self, run: str) -> tuple[RunFolder, ClientRunState]:
        """Return the folder and state of a run that was opened before; KeyError if it was not."""
        return self._runs[run]

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    @property
    def nbytes(self) -> int:
        """Return the bytes of all vectors in memory."""
        return sum(state.nbytes for _, state in self._runs.values())

    def open(self, run: str, say: Say, identity: str | None = None) -> tuple[RunFolder, ClientRunState]:
        """Return the folder and state of a run; the first call reads them from disk.

        State that is older than what the aggregator has seen is discarded, and the run starts at zero. The state of
        another run with the same id is discarded too: its `identity` differs, and nothing of it may be sent in this
        run. `identity` is given with an assignment, and None otherwise.
        """
        with self._lock:
            return self._open(run, say, identity)

    def _open(self, run: str, say: Say, identity: str | None) -> tuple[RunFolder, ClientRunState]:
        if run not in self._runs:
            self._forget_ended(run, [], say)  # runs whose assignments were declined
            try:
                folder = self._folders(self._folder, run)
            except DataLost as error:
                raise CannotReply("protocol", error.what) from error
            state, said = folder.load()
            is_same = not state.identity or self.identities.get(run, state.identity) == state.identity
            if (seen := self.seen.get(run, 0)) > state.sequence and is_same:
                said.append(
                    f"{run}: {seen} replies were sent, and this disk knows of {state.sequence}; it begins again"
                )
                why = state.lost or ("older" if state.sequence else "missing")
                state = outbox.begin_again(state, seen, why)
            for line in said:
                say(line)
            self._runs[run] = folder, state
        folder, state = self._runs[run]
        if identity is not None and not (state.outbox or state.nbytes):  # an assignment, after which state will grow
            others = [] if folder.is_only_run else self._others(run)
            self._give_up_oldest(others, say)
            self._forget_ended(run, others, say)
        if identity is not None and identity != state.identity:
            if state.sequence and not (state.lost and not state.identity):  # lost state does not name its run
                say(f"{run}: another run of this name; what this disk holds of the earlier one is not sent")
                save_values(self._folder, run, state)
                seen = self.seen.get(run, 0)
                state = ClientRunState(seen, lost="missing" if seen else "", references_from=NOT_KNOWN if seen else 0)
            state = replace(state, identity=identity)
            self._runs[run] = folder, state
        if identity and not (state.outbox or state.nbytes) and (own := saved_values(self._folder, run, identity)):
            self._runs[run] = folder, replace(state, personal=own.arrays, context=own.context)
        return self._runs[run]

    def commit(
        self, assignment: Assignment, folder: RunFolder, state: ClientRunState, parts: Mapping[str, bytes] | None = None
    ) -> None:
        """Store the state of a run: at once, or until `save` if the plan has `durability = "exit"`.

        The folders of a simulation decide this themselves.
        """
        local = {} if isinstance(assignment.plan, str) else assignment.plan.get("local", {})
        if local.get("durability") == "exit" and isinstance(folder, WriteBehindRunFolder):
            folder.hold(state, parts)
        else:
            folder.commit(state, parts)
        self._runs[assignment.run] = folder, state

    def end(self, run: str, say: Say, identity: str = "") -> bool:
        """Reduce an ended run to its sequence. Return False if this id now belongs to another run.

        A run without a folder on this disk is forgotten without a write, because its sequence is 0.
        """
        try:
            if not self._folders(self._folder, run).folder.exists():
                self._runs.pop(run, None)
                return True
            folder, state = self.open(run, say)
            if state.identity and identity != state.identity:
                say(f"{run}: another run of this name is over; what this disk holds of its own one is kept")
                return False
            save_values(self._folder, run, state)
            state = outbox.end_run(state)
            folder.commit(state)
            self._runs[run] = folder, state
        except (CannotReply, DataLost) as error:  # files that stay on disk do no harm, and other runs continue
            say(str(error))
        else:
            say(f"{run} is over")
            self._forget_ended(run, self._others(run), say)
        return True

    def _give_up_oldest(self, others: Sequence[Path], say: Say) -> None:
        """Reduce the oldest open runs among the `others` to their sequence if one more than `most()` is open."""
        most = self._most()
        full = [path for path in others if any(file.name != STATE for file in path.iterdir())]
        for path in full[: max(0, len(full) - most + 1)]:
            try:
                if path.name in self._runs:
                    folder, state = self._runs.pop(path.name)
                else:
                    folder = self._folders(self._folder, path.name)
                    state = folder.load()[0]
                save_values(self._folder, path.name, state)
                folder.commit(replace(outbox.end_run(state), lost="given-up", references_from=NOT_KNOWN))
            except (DataLost, OSError) as error:
                say(str(error))
            else:
                newer = f"{counted(most, 'newer run')} {'is' if most == 1 else 'are'} not over"
                say(f"{path.name}: {newer} (max_runs of client.toml); what was kept of this one is given up")

    def _forget_ended(self, run: str, others: Sequence[Path], say: Say) -> None:
        """Remove the oldest ended runs among the `others` above `MAX_ENDED_RUNS`, and forget runs without any state.

        An ended run keeps its sequence and owes no reply.
        """
        with self._lock:
            for name, (_, state) in list(self._runs.items()):
                if name != run and not state.nbytes and replace(state, identity="") == ClientRunState():
                    del self._runs[name]
            ended = [path for path in others if all(file.name == STATE for file in path.iterdir())]
            for path in ended[: max(0, len(ended) - MAX_ENDED_RUNS)]:
                try:
                    known = self._runs.get(path.name)
                    state = known[1] if known else self._folders(self._folder, path.name).load()[0]
                    if state.outbox or state.nbytes:
                        continue
                    (path / STATE).unlink(missing_ok=True)
                    path.rmdir()
                except (DataLost, OSError) as error:  # the folder does no harm, and the next call tries again
                    say(f"{path.name} was not removed: {error}")
                else:
                    self._runs.pop(path.name, None)

    def _others(self, run: str) -> list[Path]:
        """Return the folders of the task's other runs, the one that was written longest ago first."""
        found = self._of_task(run.rpartition("-")[0])
        return sorted((path for path in found if path.name != run), key=lambda path: path.stat().st_mtime_ns)

    def _of_task(self, task: str) -> list[Path]:
        """Return the folders of a task's runs, whose ids are TASK-N. What else lies beside them is no run."""
        named = (path for path in (self._folder / "runs").glob("*") if path.name.rpartition("-")[0] == task)
        return [path for path in named if RUN_ID.fullmatch(path.name) and path.is_dir()]

    def save(self, say: Say) -> None:
        """Make durable the state that plans allow to wait: at the exit, and from time to time before it."""
        for folder, _ in list(self._runs.values()):
            if isinstance(folder, WriteBehindRunFolder):
                try:
                    folder.save()
                except (DataLost, OSError) as error:
                    say(f"{folder.folder.name}: the pending state was not saved: {error}")

    def unsent_replies(self, task: str, say: Say) -> list[tuple[ReplyHeader, Path | None]]:
        """Return every reply of a task's runs on disk that has no outcome yet. A new process sends these again."""
        found = []
        for path in sorted(self._of_task(task)):
            if (path / STATE).exists():
                folder, state = self.open(path.name, say)
                found += [(entry.header, folder.path(entry)) for entry in state.outbox]
        return found

    def open_runs(self, task: str) -> dict[str, str]:
        """Return the identities of a task's runs on disk of whose end the device does not know, by run.

        Only `STATE` is read. A run of which this disk holds no more than its sequence is not among them.
        """
        found = dict[str, str]()
        for path in self._others(f"{task}-"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                raw = json.loads((path / STATE).read_bytes())
                if raw["identity"] and (raw["outbox"] or any(file.name != STATE for file in path.iterdir())):
                    found[path.name] = str(raw["identity"])
        return found

    def mark_delivered(
        self, reply: Reply, remove: Callable[[ClientRunState, ReplyHeader], ClientRunState] = outbox.remove_delivered
    ) -> None:
        """Record that the aggregator has a reply: `remove` removes it from the outbox, and its file is deleted.

        By default that is a reply for which no outcome will come.
        """
        if not isinstance(reply, ReplyHeader):
            return
        with self._lock:
            if reply.update_id.run not in self._runs:
                return
            folder, state = self._runs[reply.update_id.run]
            after = remove(state, reply)
            self._runs[reply.update_id.run] = folder, after
        if after is not state and reply.parts:
            with contextlib.suppress(DataLost):  # a full disk: the next commit removes the file
                folder.commit_smaller(after)


MAX_PLANS = 32
MAX_BYTES = 2**16  # of one plan, which has few values; a larger one is used and not kept
DIGEST = re.compile(r"[0-9a-f]{64}")


class PlanStore:
    """The resolved plans that this device keeps: in memory, and in `folder` if it is given, for the next process.

    At most `MAX_PLANS` plans are kept; the least recently used is removed first.
    """

    def __init__(self, folder: Path | None = None, write: Write = write_atomically) -> None:
        self.folder, self._write = folder, write
        self._held: dict[str, Mapping[str, Any]] = {}  # by digest, least recently used first
        self._parsed: tuple[Mapping[str, Any], RunPlan] | None = None
        self._hashed: tuple[Mapping[str, Any], str, bytes] | None = None  # the plan that came last; its JSON if small
        self._named: dict[str, str] = {}  # assignment id -> the digest that it named and that was not here
        for path in self._files():
            self._load(path)

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the digests of all plans that are kept; a hello reports them."""
        return tuple(self._held)

    def known(self, assignment: Assignment) -> Mapping[str, Any] | None:
        """Return the assignment's plan, None if it is neither here nor in the assignment. Nothing is kept."""
        return self._held.get(assignment.plan) if isinstance(assignment.plan, str) else assignment.plan

    def parsed(self, plan: Mapping[str, Any]) -> RunPlan:
        """Return a plan from its JSON; the same object that was parsed last is not parsed again."""
        if self._parsed is None or self._parsed[0] is not plan:
            self._parsed = plan, RunPlan.from_json(plan)
        return self._parsed[1]

    def of(self, assignment: Assignment) -> Mapping[str, Any]:
        """Return the assignment's plan, and keep it.

        Raises `CannotReply` ("need-plan") if only a digest came and its plan is not here.
        """
        if isinstance(assignment.plan, str):
            if (plan := self._held.pop(assignment.plan, None)) is None:
                self._await(assignment.assignment_id, assignment.plan)
                raise CannotReply("need-plan", "the plan was sent by its digest only")
            self._held[assignment.plan] = plan
            self._touch(assignment.plan)
            return plan
        if not isinstance(assignment.plan, Mapping):
            raise CannotReply("protocol", "the assignment has neither a plan nor its digest")
        if self._hashed is None or self._hashed[0] is not assignment.plan:
            data = canonical(assignment.plan)
            self._hashed = assignment.plan, hashlib.sha256(data).hexdigest(), data if _is_small(data) else b""
        _, digest, data = self._hashed
        if self._named.get(assignment.assignment_id, digest) != digest:
            raise CannotReply("protocol", "the plan that came is not the one whose digest was sent before")
        self._keep(digest, assignment.plan, data)
        return self._held.get(digest, assignment.plan)

    def _await(self, assignment_id: str, digest: str) -> None:
        """Remember the digest, so that the plan that comes with the repeated assignment is compared with it."""
        if DIGEST.fullmatch(digest):
            self._named[assignment_id] = digest
            while len(self._named) > MAX_PLANS:
                del self._named[next(iter(self._named))]

    def _keep(self, digest: str, plan: Mapping[str, Any], data: bytes) -> None:
        """Keep a plan whose JSON is small. If the disk refuses, it is sent again, and nothing else is lost."""
        if (known := self._held.pop(digest, None)) is not None:
            self._held[digest] = known
            self._touch(digest)
            return
        if not data:
            return
        self._held[digest] = plan
        if self.folder is not None:
            with contextlib.suppress(ThinwireError):
                self._write(private_folder(self.folder) / f"{digest}.json", data)
        while len(self._held) > MAX_PLANS:
            self._forget(next(iter(self._held)))

    def _files(self) -> list[Path]:
        """Return the plan files, least recently used first."""
        if self.folder is None or not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _load(self, path: Path) -> None:
        """Read a plan file; one whose content does not match its name is deleted."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            plan = json.loads(data) if _is_small(data) else None
            if DIGEST.fullmatch(path.stem) and isinstance(plan, dict) and digest_of(plan) == path.stem:
                self._held[path.stem] = plan
                while len(self._held) > MAX_PLANS:
                    self._forget(next(iter(self._held)))
                return
        with contextlib.suppress(OSError):
            path.unlink()

    def _touch(self, digest: str) -> None:
        """Set the file's time to now: the time of the last use."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.utime(self.folder / f"{digest}.json")

    def _forget(self, digest: str) -> None:
        self._held.pop(digest, None)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / f"{digest}.json").unlink()


def _is_small(data: bytes) -> bool:
    """Return True if a plan's JSON, and its objects in memory, are small enough to keep `MAX_PLANS` of them."""
    try:
        require_small(data, MAX_BYTES // BYTES_A_TOKEN)
    except ValueError:
        return False
    return len(data) <= MAX_BYTES


FOLDERS = (PERSONAL, "runs", "downloads", "plans")
LOGS = ("client.log", "worker.log", "last-error.txt")  # an exception's text and a task's prints may contain data


def delete_learned(folder: Path) -> None:
    """Delete updates, residuals, models, plans and logs. The owner's settings stay; a link is removed, never followed.

    Raises `DataLost`, which names the path that could not be deleted.
    """
    found = [folder / name for name in FOLDERS] + [path for name in LOGS for path in folder.glob(f"{name}*")]
    for path in found:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise DataLost(
                f"cannot delete {path}", why=error.strerror or str(error),
                hint="make it writable and leave again: it may hold what was learned from this device's data",
            ) from error  # fmt: skip
