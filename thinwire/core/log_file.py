"""Keep the output of a process in a log file of bounded size, because the SD card of a device is small.

`Logbook` writes each line with its time, to two files of at most `MAX_BYTES` each. `append_all` keeps what another
process prints, `bounded_log` what this process prints. `last_lines` and `new_lines` read the files.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TextIO

from thinwire.core.clock import repeating
from thinwire.core.formatting import plain
from thinwire.core.statedir import private_opener

LOG_FILE = "client.log"  # and client.log.1, the one before
MAX_BYTES = 500_000  # of each of the two files: about a thousand rounds
MAX_LOG_BYTES = 1 << 20  # of what a process prints, and of the log before: strangers and foreign apps can make it print
FOLLOW_S = 0.25  # between two reads of a log that is followed
SIZE_CHECK_S = 1.0  # between two looks at the size of this process's output
OUTPUT = (1, 2)  # descriptors: also what C code prints


class Logbook:
    """A `say` that writes each line to the log file and then passes it on. A full disk ends nothing.

    A line may quote an aggregator, so control characters are replaced: none of them moves a terminal's cursor. Any
    thread may call it.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], most: int = MAX_BYTES, wall: Callable[[], float] = time.time,
        file_name: str = LOG_FILE,
    ) -> None:  # fmt: skip
        self._path, self._say, self._most, self._wall = folder / file_name, say, most, wall
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        """Write the lines of `line` with the time (UTC), and pass them on."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall()))
        lines = [plain(one) for one in line.splitlines()] or [""]
        text = "".join(f"{stamp} {one}\n" for one in lines).encode(errors="replace")
        with self._lock, contextlib.suppress(OSError):
            append(self._path, text[: self._most], self._most)
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a terminal that is closed
            self._say("\n".join(lines))


def append(path: Path, text: bytes, most: int) -> None:
    """Append to a file. One that would grow beyond `most` bytes becomes PATH.1 first, in the place of the older one."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.fstat(descriptor).st_size + len(text) > most:
            os.replace(path, path.with_name(f"{path.name}.1"))
            os.close(descriptor)
            descriptor = os.open(path, flags, 0o600)
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def append_all(said: IO[bytes], path: Path, most: int) -> None:
    """Append what another process prints, until it and all that it started have ended. A full disk stops no process."""
    with said:
        while text := os.read(said.fileno(), min(most, 1 << 16)):
            with contextlib.suppress(OSError):
                append(path, text, most)


@contextlib.contextmanager
def bounded_log(log: Path, most: int, outputs: Sequence[int] = OUTPUT) -> Iterator[None]:
    """Rotate the log while the block runs: a log of more than `most` bytes becomes LOG.1.

    The size is checked each `SIZE_CHECK_S` seconds. Output that goes to a terminal or systemd's journal is not touched.

    Invariant: no line is lost, and the last line of a crash is in the file, because this process writes to it directly.
    """
    is_ours = _is_output(log, outputs)
    with (
        repeating(lambda: turn_over(log, most, outputs), SIZE_CHECK_S, log.name)
        if is_ours
        else contextlib.nullcontext()
    ):
        yield


def turn_over(log: Path, most: int, outputs: Sequence[int] = OUTPUT) -> None:
    """Redirect the output into a new file if it goes to `log` and that is larger than `most` bytes."""
    if not _is_output(log, outputs) or os.fstat(outputs[0]).st_size <= most:
        return
    os.replace(log, log.with_name(f"{log.name}.1"))
    with open(log, "ab", opener=private_opener) as fresh:
        for descriptor in outputs:
            os.dup2(fresh.fileno(), descriptor)


def _is_output(log: Path, outputs: Sequence[int]) -> bool:
    """Return True if all these descriptors of this process go to this file."""
    try:
        there = log.stat()
        return all(os.path.samestat(os.fstat(descriptor), there) for descriptor in outputs)
    except OSError:
        return False


def last_lines(folder: Path, count: int, file_name: str = LOG_FILE) -> list[str]:
    """Return the newest `count` lines, oldest first; fewer if there are no more."""
    kept: deque[str] = deque(maxlen=count)
    for name in (f"{file_name}.1", file_name):
        with contextlib.suppress(FileNotFoundError), open(folder / name, errors="replace") as file:
            kept.extend(line.rstrip("\n") for line in file)
    return list(kept)


def new_lines(folder: Path, wait: Callable[[float], None] = time.sleep, file_name: str = LOG_FILE) -> Iterator[str]:
    """Yield lines as they come, from now on and without end. A file that is replaced is read to its end first."""
    path, rest = folder / file_name, ""
    with contextlib.ExitStack() as stack:
        file = _opened(path, stack)
        if file is not None:
            file.seek(0, os.SEEK_END)
        while True:
            replaced = file is None or not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino
            if file is not None:
                *whole, rest = (rest + file.read()).split("\n")
                yield from whole
            if replaced:
                stack.close()
                file = _opened(path, stack)
            wait(FOLLOW_S)


def _opened(path: Path, stack: contextlib.ExitStack) -> TextIO | None:
    with contextlib.suppress(FileNotFoundError):
        return stack.enter_context(open(path, errors="replace"))
    return None
