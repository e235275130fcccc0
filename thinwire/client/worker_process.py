"""Run the worker: the process that trains. It is connected by a socket, its log is bounded, and it can always be ended.

`WorkerProcess` is the process itself. `Watchdog` decides how long the client waits for it: until its deadline, and as
long as it sends signs of life. `Interpreter` is the Python that trains: Thinwire's own, or another one that has numpy
and torch and no Thinwire.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thinwire
from thinwire.client.errors import CannotReply
from thinwire.client.train.errors import Cancelled
from thinwire.client.train.framed_socket import BadFrame, FramedSocket
from thinwire.core.errors import UsageError
from thinwire.core.log_file import append_all
from thinwire.core.signals import until
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.client.train.protocol import Arrays, OnProgress


LOG = "worker.log"
MAX_LOG = 1 << 20  # bytes of the log, and of the older one
EXIT_GRACE_S = 5.0  # within which the process must exit after its socket was closed


class WorkerDied(CannotReply):
    """Raised if the process exited or was killed, so that the assignment on which it worked fails."""

    def __init__(self, why: str) -> None:
        super().__init__("worker", why)


class WorkerProcess:
    """The worker process. It inherits one end of a socket and nothing else.

    It has a session (`setsid`) of its own, so every process that it starts is ended with it.

    Invariant: whatever the process does or sends, a call returns a message or raises `WorkerDied`. After `WorkerDied`
    the process is gone.
    """

    def __init__(self, interpreter: Interpreter, folder: Path, io_timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(io_timeout_s)  # for a header or a vector that has begun, in both directions
        with theirs:
            try:
                self.process = subprocess.Popen(
                    interpreter.command(theirs.fileno()),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),), start_new_session=True, env=dict(interpreter.environment),
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise WorkerDied(f"it did not start: {error.strerror}") from error
        self._wire, self._folder, self._is_reaped = FramedSocket(ours), folder, False
        self._log = threading.Thread(target=self._keep_log, daemon=True, name="worker's log")
        self._log.start()

    @property
    def alive(self) -> bool:
        """Return True if the process runs. One that has ended stays a zombie, so that its group keeps its id."""
        if self.process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self.process.poll() is None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    def send(self, header: Mapping[str, Any], *vectors: Vector, arrays: Arrays | None = None) -> None:
        """Send a message with its vectors and named arrays."""
        with self.translated_errors():
            self._wire.send(header, *vectors, arrays=arrays)

    def receive(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next message of the process, None if none comes within `wait_s`."""
        with self.translated_errors():
            if not select.select([self._wire.sock], [], [], wait_s)[0]:
                return None
            return self._wire.header()

    def vectors(self, header: Mapping[str, Any], sizes: Sequence[int]) -> list[Vector]:
        """Return the vectors that follow the message `header`, if they have these sizes."""
        with self.translated_errors():
            return self._wire.vectors(header, sizes)

    def arrays(self, header: Mapping[str, Any], max_bytes: int) -> Arrays | None:
        """Return the named arrays behind the vectors of the message `header`, None if it has none."""
        with self.translated_errors():
            return self._wire.arrays(header, max_bytes)

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translate I/O and framing errors of the process into `WorkerDied`.

        A process that sent an invalid message, or stopped in the middle of one, is killed.
        """
        try:
            yield
        except EOFError:
            raise WorkerDied(describe_exit(self._reap(EXIT_GRACE_S))) from None
        except (BadFrame, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            self.kill()
            raise WorkerDied("it sent an invalid message") from error
        except TimeoutError as error:
            self.kill()
            raise WorkerDied("it stopped in the middle of a message") from error

    def close(self) -> None:
        """Close the socket, which ends the process.

        Wait up to `EXIT_GRACE_S` for it and for what it started, then kill its process group.
        """
        self._wire.sock.close()
        self._log.join(EXIT_GRACE_S)  # until no process that it started can print any more
        self._reap(0.0)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        self._reap(0.0)

    def _reap(self, wait_s: float) -> int:
        self._wire.sock.close()
        if not self._is_reaped:
            until(lambda: not self.alive, wait_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # also what a process that ended has started
                os.killpg(self.process.pid, signal.SIGKILL)
            self._is_reaped = True
        return self.process.wait()

    def _keep_log(self) -> None:
        assert self.process.stdout is not None
        append_all(self.process.stdout, self._folder / LOG, MAX_LOG)


def describe_exit(code: int) -> str:
    """Describe an exit code.

    >>> describe_exit(-9), describe_exit(3)
    ('killed by SIGKILL: perhaps there was no memory left', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"killed by {name}" + (": perhaps there was no memory left" if name == "SIGKILL" else "")
    return f"killed by signal {-code}"


WITHDRAWN_CHECK_S = 0.1  # between two checks if the assignment was withdrawn
CANCEL_GRACE_S = 5.0  # within which the process must stop after the message that the assignment was withdrawn
HUNG_S = 60.0  # past the deadline without a sign of life
MAX_DOUBLINGS = 10  # of the time that a worker has


@dataclass(frozen=True)
class Deadline:
    """A deadline on a worker's clock. `given_s` are the seconds that were left when the work began."""

    at: float
    given_s: float


class Watchdog:
    """The watchdog of one worker. `hung_s` is the least silence after which a late worker is killed.

    Invariant: a worker that hangs is killed past its deadline after `hung_s`, or after the time that it had, if that is
    longer. After each worker that hung the next one has twice as long, so slow work ends at some time.
    """

    def __init__(self, hung_s: float, clock: Callable[[], float]) -> None:
        self.hung_s, self._clock, self._hung = hung_s, clock, 0

    def deadline(self, left_s: float | None) -> Deadline | None:
        """Return the deadline `left_s` from now, None without one."""
        return None if left_s is None else Deadline(self._clock() + left_s, left_s)

    def reset(self) -> None:
        """Reset the doublings, because a request was completed."""
        self._hung = 0

    def wait_for_result(
        self,
        child: WorkerProcess,
        on_progress: OnProgress,
        cancelled: Callable[[], bool],
        deadline: Deadline | None,
        number: int = 0,
    ) -> dict[str, Any]:
        """Return the message that ends request `number`; until then pass on the progress that the process reports.

        Raises `Cancelled` if the process did not stop the withdrawn work in time, and `WorkerDied` if it hung. In both
        cases it was killed.
        """
        alive_at, cancelled_at = self._clock(), None
        while True:
            header, now = child.receive(WITHDRAWN_CHECK_S), self._clock()
            if header is not None:
                if "told" not in header:
                    return header
                with child.translated_errors():
                    what, done, total = header["told"]
                    on_progress(str(what), int(done), int(total))
                alive_at = now
            if cancelled_at is None and cancelled():
                cancelled_at = now
                child.send({"do": "cancel", "id": number})
            if cancelled_at is not None and now - cancelled_at > CANCEL_GRACE_S:
                child.kill()
                raise Cancelled
            if deadline is not None and now - max(deadline.at, alive_at) > self._for_s(deadline):
                child.kill()
                self._hung += 1
                raise WorkerDied(f"hung: {now - alive_at:.0f} s without a sign of life, and past the deadline")

    def _for_s(self, deadline: Deadline) -> float:
        return max(self.hung_s, deadline.given_s) * 2.0 ** min(self._hung, MAX_DOUBLINGS)


OURS = Path(thinwire.__file__).parent
MIN_PYTHON = (3, 8)
INTERPRETER_TIMEOUT_S = 60.0  # for one command of another Python: an SD card is slow
PACKAGES = ("numpy", "torch")
# `thinwire` is loaded by its path: nothing else on this interpreter's path hides it or is hidden by it.
IMPORT_SCRIPT = """
import sys, importlib.util
if sys.path[:1] == [""]: del sys.path[0]
found = importlib.util.spec_from_file_location("thinwire", sys.argv[2] + "/__init__.py",
    submodule_search_locations=[sys.argv[2]])
sys.modules["thinwire"] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules["thinwire"])
from thinwire.client.train.worker import main
"""
SERVE_SCRIPT = "main(int(sys.argv[1]))"
SERVE_SCRIPT_WITH_SECRETS = """
def secrets():
    from thinwire.client.private_noise import DeviceSecrets
    return DeviceSecrets()
main(int(sys.argv[1]), secrets)
"""
VERSIONS_SCRIPT = """
import json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name in sys.argv[1:]:
    try:
        from importlib.metadata import version
        found[name] = version(name)
    except ImportError: pass
print(json.dumps(found))
"""


def installed() -> dict[str, str]:
    """Return the versions of this Python and of the packages it trains with, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True)
class Interpreter:
    """The Python that trains. `path` is None for Thinwire's own.

    `folder` is the client's directory, where another Python finds a copy of Thinwire's modules that it needs.
    """

    path: Path | None
    folder: Path

    def command(self, descriptor: int) -> list[str]:
        """Return the command line of the worker that uses this socket."""
        code = OURS if self.path is None else self._copied()
        # Another Python has no sampler of Thinwire's.
        script = IMPORT_SCRIPT + (SERVE_SCRIPT if self.path is not None else SERVE_SCRIPT_WITH_SECRETS)
        return [str(self.path or sys.executable), "-c", script, str(descriptor), str(code)]

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of the worker: this process's, without `PYTHONHOME` for another Python."""
        kept = {name: value for name, value in os.environ.items() if self.path is None or name != "PYTHONHOME"}
        return {**kept, "PYTHONUNBUFFERED": "1"}

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return the versions of Python, numpy and torch from their metadata, without importing them.

        A package without metadata is left out. Raises `UsageError` if `path` is no Python that can train.
        """
        return installed() if self.path is None else self._versions_of(self.path)

    def _versions_of(self, path: Path) -> Mapping[str, str]:
        try:
            done = subprocess.run(
                [str(path), "-c", VERSIONS_SCRIPT, *PACKAGES], capture_output=True, timeout=INTERPRETER_TIMEOUT_S,
                env=dict(self.environment), stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            found = json.loads(done.stdout)
            python = tuple(int(number) for number in str(found["python"]).split("."))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--python {path} does not run",
                why=str(error)[:200] if isinstance(error, OSError) else "it does not answer as a Python does",
                hint="a Python from 3.8 on with numpy and torch",
            ) from error
        if python < MIN_PYTHON:
            raise UsageError(f"--python {path} is Python {found['python']}", why="3.8 is the oldest that can train")
        return {str(name): str(value) for name, value in found.items()}

    def _copied(self) -> Path:
        """Copy the modules that the worker needs: `train/` imports nothing else of Thinwire."""
        root = self.folder / "worker" / "thinwire"
        inner = [path.relative_to(OURS) for path in sorted((OURS / "client" / "train").glob("*.py"))]
        for name in (Path("__init__.py"), Path("client", "__init__.py"), *inner):
            data, path = (OURS / name).read_bytes(), root / name
            if not path.is_file() or path.read_bytes() != data:
                private_folder(path.parent)
                write_atomically(path, data)
        return root
