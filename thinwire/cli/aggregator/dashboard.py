"""The dashboard as a child process of the aggregator, and the bounded logs of both.

The dashboard is a process of its own, so that its end never stops training. The output of an aggregator in the
background goes to service.log, which is rotated: two files bound its size.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from thinwire.cli.params import Address

READY_S = 30.0
PAUSE_S = 5.0  # between two starts of a dashboard that ended by itself
END_S = 5.0
MAX_LOG_BYTES = 1 << 20  # of dashboard.log and its predecessor dashboard.log.1: strangers can make the dashboard print


class Page:
    """The process `python -m thinwire.web` on the store: restarted if it ends by itself, ended with the aggregator."""

    def __init__(
        self,
        database: str,
        lock: Path,
        address: Address,
        log: Path,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.address, self._log, self._say = address, log, say
        self._environment = dict(environment)
        self._command = [sys.executable, "-m", "thinwire.web", "--database", database, "--lock", str(lock)]
        self._command += ["--listen", str(address), "--parent", str(os.getpid())]
        self._ending = threading.Event()
        self._process = self._begin()
        self._watch = threading.Thread(target=self._keep, name="dashboard", daemon=True)

    def __enter__(self) -> Self:
        """Wait until the dashboard listens; `Unreachable` with the last line of its log if it does not."""
        from thinwire.core.errors import Unreachable

        words = ["it said nothing"]
        if not _ready(self._process, READY_S):
            self._end()
            self._logging.join(END_S)
            with contextlib.suppress(OSError):
                words = self._log.read_text(errors="replace").strip().splitlines()[-1:] or words
            raise Unreachable(
                f"the dashboard did not start on {self.address}",
                why=words[0],
                hint=f"{self._log} says more; or --no-dashboard",
            )
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self._end()
        self._watch.join(END_S)
        self._logging.join(END_S)

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the process and the thread that writes its log."""
        from thinwire.core.log_file import append_all

        process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self._environment, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        said = (process.stderr, self._log, MAX_LOG_BYTES)
        self._logging = threading.Thread(target=append_all, args=said, name="dashboard.log", daemon=True)
        self._logging.start()
        return process

    def _keep(self) -> None:
        """Restart the process `PAUSE_S` after each unexpected end."""
        while True:
            assert self._process.stdout is not None
            for _ in self._process.stdout:  # drain the pipe: if it fills up, the dashboard blocks
                pass
            code = self._process.wait()
            if self._ending.is_set():
                return
            self._say(f"the dashboard ended ({code}) and is started again; training goes on. {self._log} says more")
            if self._ending.wait(PAUSE_S):
                return
            self._process = self._begin()

    def _end(self) -> None:
        """Terminate the process, and kill it after `END_S`."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ready(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Return True if the process printed `ready ...` as its first line within `within_s` seconds."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], within_s)
    with contextlib.suppress(OSError):
        return bool(readable) and process.stdout.readline().startswith(b"ready")
    return False


FILE = "service.log"  # its predecessor is service.log.1
LOOK_S = 1.0
OUTPUT = (1, 2)  # descriptors: also what C code prints


@contextlib.contextmanager
def bounded(log: Path, most: int = MAX_LOG_BYTES, every_s: float = LOOK_S) -> Iterator[None]:
    """Rotate the log while the block runs: a log of more than `most` bytes becomes LOG.1.

    The size is checked each `every_s` seconds. Output that goes to a terminal or systemd's journal is not touched.

    Invariant: no line is lost, and the last line of a crash is in the file, because this process writes to it directly.
    """
    from thinwire.core.clock import repeating

    with repeating(lambda: turn_over(log, most), every_s, FILE) if _is_output(log) else contextlib.nullcontext():
        yield


def turn_over(log: Path, most: int) -> None:
    """Redirect the output into a new file if it goes to `log` and that is larger than `most` bytes."""
    from thinwire.core.statedir import private_opener

    if not _is_output(log) or os.fstat(OUTPUT[0]).st_size <= most:
        return
    os.replace(log, log.with_name(f"{log.name}.1"))
    with open(log, "ab", opener=private_opener) as fresh:
        for descriptor in OUTPUT:
            os.dup2(fresh.fileno(), descriptor)


def _is_output(log: Path) -> bool:
    """Return True if stdout and stderr of this process both go to this file."""
    try:
        there = log.stat()
        return all(os.path.samestat(os.fstat(descriptor), there) for descriptor in OUTPUT)
    except OSError:
        return False
