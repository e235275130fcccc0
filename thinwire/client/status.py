"""Record what a client is doing: a status file for `thinwire client status`, and a log of bounded size.

`StatusReporter` wraps the client's link, through which everything passes, and writes `ClientStatus` after each call.
`Logbook` writes each line with its time, to two files of at most `MOST_BYTES` each, because the SD card of a device is
small.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, TextIO

from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import Delivery, Hello, Link, Welcome
from thinwire.core.formatting import plain
from thinwire.core.statedir import private_opener
from thinwire.core.types import Failure, ReplyHeader

STATUS_FILE = "status.json"


@dataclass(frozen=True)
class ClientStatus:
    """The status of a client.

    Times are this machine's, in seconds since 1970. `skew_s` is how far its clock is behind the aggregator's. In the
    state `away`, the aggregator does not respond, or has the client come later. `last_error` has the reason, and stays
    when that is over.
    """

    state: Literal["connecting", "idle", "working", "away"] = "connecting"
    at: float = 0.0
    connected_at: float | None = None  # since this time every call succeeded
    run: str = ""
    round: int = 0
    answered: int = 0  # since this process began
    last_error: str = ""
    last_error_at: float | None = None
    skew_s: float | None = None

    @classmethod
    def load(cls, folder: Path) -> ClientStatus | None:
        """Return the status that was written last, None if it is missing or unreadable.

        The process that wrote it may have ended.
        """
        try:
            said: dict[str, Any] = json.loads((folder / STATUS_FILE).read_bytes())
            return cls(**said)
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def save(self, folder: Path) -> None:
        """Replace the status file without a sync: it does not matter after a power cut, and cards wear out."""
        draft = folder / f".{STATUS_FILE}.new"
        with contextlib.suppress(OSError):  # a full disk must not end the service
            with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
                json.dump(asdict(self), file)
            os.replace(draft, folder / STATUS_FILE)


class StatusReporter:
    """A `Link` that passes each call to `inside` and writes the status to `folder`. Any thread may call it."""

    def __init__(self, inside: Link, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._link, self._folder, self._wall = inside, folder, wall
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, int]] = {}  # assignment id -> run and round
        self._at, self._answered = ClientStatus(), 0
        self._now()

    def hello(self, hello: Hello) -> Welcome:
        """Send the hello, and measure the clock's skew by the aggregator's time."""
        with self._watched():
            welcome = self._link.hello(hello)
        if welcome.server_time:  # less than a round trip old, however long the hello waited before
            self._now(skew_s=round(welcome.server_time - self._wall(), 3))
        return welcome

    def pull(self, wait_s: float) -> Delivery | None:
        """Pull an assignment, and record its work as begun."""
        with self._watched():
            delivery = self._link.pull(wait_s)
            if delivery is not None and delivery.ask.kind != "stop":
                with self._lock:
                    self._open[delivery.ask.ask_id] = delivery.ask.run, delivery.ask.round
        return delivery

    def push(self, reply: ReplyHeader | Failure, bundle: Path | None = None) -> None:
        """Push a reply, and record its assignment as done."""
        with self._watched():
            self._link.push(reply, bundle)
            with self._lock:
                self._open.pop(reply.ask_id, None)
                self._answered += 1

    def cancelled(self) -> frozenset[str]:
        """Return the ids of withdrawn assignments."""
        return self._link.cancelled()

    def close(self) -> None:
        """Close the link inside."""
        self._link.close()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Record one call: its error as the last one, its success as being connected."""
        try:
            yield
        except ThinwireError as error:
            self._now(connected_at=None, last_error=str(error), last_error_at=self._wall())
            raise
        self._now(connected_at=self._at.connected_at or self._wall())

    def _now(self, **changed: Any) -> None:
        with self._lock:
            for ask_id in self._link.cancelled():
                self._open.pop(ask_id, None)
            at = replace(self._at, at=self._wall(), answered=self._answered, **changed)
            if at.connected_at is None:
                at = replace(at, state="connecting" if at.last_error_at is None else "away")
            elif self._open:
                run, number = next(reversed(self._open.values()))
                at = replace(at, state="working", run=run, round=number)
            else:
                at = replace(at, state="idle")
            self._at = at
            at.save(self._folder)


LOG_FILE = "client.log"  # and client.log.1, the one before
MOST_BYTES = 500_000  # of each of the two files: about a thousand rounds
LOOK_S = 0.25


class Logbook:
    """A `say` that writes each line to the log file and then passes it on. A full disk ends nothing.

    A line may quote an aggregator, so control characters are replaced: none of them moves a terminal's cursor. Any
    thread may call it.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], most: int = MOST_BYTES, wall: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._say, self._most, self._wall = folder, say, most, wall
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        """Write the lines of `line` with the time (UTC), and pass them on."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall()))
        lines = [plain(one) for one in line.splitlines()] or [""]
        text = "".join(f"{stamp} {one}\n" for one in lines).encode(errors="replace")
        with self._lock, contextlib.suppress(OSError):
            append(self._folder / LOG_FILE, text[: self._most], self._most)
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
            wait(LOOK_S)


def _opened(path: Path, stack: contextlib.ExitStack) -> TextIO | None:
    with contextlib.suppress(FileNotFoundError):
        return stack.enter_context(open(path, errors="replace"))
    return None
