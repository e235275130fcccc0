"""Processes that a measurement starts: they end with it, whatever happens, and nobody else's do."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

END_S = 10.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Processes:
    """Starts processes, and ends them with all that they started. Their output goes to FOLDER/NAME.log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begun = {pid: at for process in self._started.values() for pid, at in descendants(process.pid).items()}
        for process in reversed(self._started.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + END_S
        for process in self._started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for pid, began in begun.items():
            _end(pid, began, signal.SIGKILL)
        for process in self._started.values():
            process.wait()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start it; gives its process id."""
        with open(self.log(name), "wb") as log:
            self._started[name] = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._started[name].pid

    def running(self, pid: int) -> bool:
        """Return True if the process that was started with this id goes on."""
        return any(process.pid == pid and process.poll() is None for process in self._started.values())

    def ended(self, pid: int, within_s: float) -> None:
        """Wait until the process that was started with this id has ended; it is not waited for any more."""
        name = next(name for name, process in self._started.items() if process.pid == pid)
        self._started.pop(name).wait(within_s)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def until(self, there: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait until `there()`; a process of ours that ended, or too much time, is an error with its last words."""
        deadline = time.monotonic() + within_s
        while not there():
            for name, process in self._started.items():
                if process.poll() not in (None, 0):
                    raise RuntimeError(f"{name} ended with {process.returncode} before {what}:\n{self._tail(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self._tail(name)}" for name in self._started)
                raise TimeoutError(f"{what}: not within {within_s:g} s\n{logs}")
            time.sleep(0.05)

    def _tail(self, name: str) -> str:
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-20:])


class LineProcess:
    """A process that reads a line and answers it by a line of JSON; it ends when its input does."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self.log, self._asked = process, log, threading.Lock()
        self.first = self._heard()

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: str) -> dict[str, Any]:
        """Its answer to a line."""
        assert self._process.stdin is not None
        with self._asked:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the process ended with {self._process.poll()}; its last words are in {self.log}")
        return dict(json.loads(line))


@contextlib.contextmanager
def line_process(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[LineProcess]:
    """Start a process that is asked by lines; it ends with the context."""
    with open(log, "wb") as err:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield LineProcess(process, log)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def descendants(pid: int) -> dict[int, str]:
    """A process and all that it and those started: id -> when it began, which tells it from a later one of that id."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = (int(fields[1]), fields[19])
    found = {pid: parents[pid][1]} if pid in parents else {}
    more = True
    while more:
        new = {child: began for child, (parent, began) in parents.items() if parent in found and child not in found}
        found |= new
        more = bool(new)
    return found


def _end(pid: int, began: str, number: int) -> None:
    """Signal a process unless its number is another one's by now."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19] == began:
            os.kill(pid, number)


PORTS = range(12_000, 32_768)  # below those that Linux gives to outgoing connections and to port 0
_candidates = itertools.count(secrets.randbelow(len(PORTS)))


def free_port() -> int:
    """Return a port that no process listens on, and that this process has not returned before.

    A port that was bound to 0 and let go could go to another process's connection before the caller listens on it.
    """
    for nth in itertools.islice(_candidates, len(PORTS)):
        port = PORTS[nth % len(PORTS)]
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("0.0.0.0", port))  # a caller may listen on any address
            return port
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop - 1}")


def status_bytes(pid: int, key: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the most ever) of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def tree_bytes(pid: int) -> int:
    """Memory of a process and all that it and those started, what they share counted once (PSS)."""
    total = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
