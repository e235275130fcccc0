"""The demo's processes: an aggregator and its clients, each started by the command that a person would type.

One client is slow all the time. Another one is killed half-way and started again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from thinwire.cli.local_state import alive
from thinwire.cli.params import Address
from thinwire.core.signals import undisturbed, until

if TYPE_CHECKING:
    from thinwire.core.events import Event


START_S = 60.0
END_S = 10.0
STARTS = 3  # a port may be taken between the look and the start


class Crowd:
    """All processes of the demo. Invariant: `close` leaves none of them behind."""

    def __init__(self, home: Path) -> None:
        self.home, self.api = home, ""
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def aggregator(self) -> dict[str, Any]:
        """Start the aggregator on free ports, and return its description.

        The default ports stay for an aggregator of the user's own: its clients would join this one there.
        """
        from thinwire.core.errors import ThinwireError

        for _ in range(STARTS):
            listen, at = (Address("127.0.0.1", 0).require_free("--listen") for _ in range(2))
            self._start("aggregator", ["aggregator", "start", "--listen", str(listen), "--dashboard", str(at)])
            until(lambda: self._is_up(self._running["aggregator"]), START_S)
            about = alive(self.home)
            if about is not None and "listen" in about:
                self.api = f"http://{about['listen']}"
                return about
        raise ThinwireError("the demo's aggregator did not start", why=self.last_words("aggregator"))

    def _is_up(self, process: subprocess.Popen[bytes]) -> bool:
        """Return True if the process has ended or serves."""
        return process.poll() is not None or "listen" in (alive(self.home) or {})

    def client(self, name: str, arguments: Sequence[str], step_s: float = 0.0) -> None:
        """Start the client `name` with these arguments of `client start`; its task takes `step_s` longer for a step."""
        self._start(name, ["client", "start", "--name", name, *arguments], {STEP_S: str(step_s)})

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, as a power failure does."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def dead(self) -> list[str]:
        """Return the processes that ended by themselves; none should."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def last_words(self, name: str) -> str:
        """Return the last lines of a process's log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log(name).read_text(errors="replace").strip().splitlines()[-4:])
        return ""

    def close(self) -> None:
        """End all processes, clients first, and kill those left after `END_S`; Ctrl-C does not interrupt it."""
        with undisturbed():
            processes = list(self._running.values())
            for process in processes[::-1]:
                process.terminate()
            until(lambda: all(process.poll() is not None for process in processes), END_S)
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            self._running.clear()

    def _start(self, name: str, arguments: list[str], more: Mapping[str, str] | None = None) -> None:
        """Start `thinwire` with these arguments, its output in the process's log."""
        from thinwire.core.statedir import private_opener

        # -P: the folder that the person is in may hold another thinwire/
        command = [sys.executable, "-P", "-m", "thinwire.cli", *arguments, "--home", str(self.home)]
        with open(self.log(name), "ab", opener=private_opener) as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **(more or {})},
                start_new_session=True,  # Ctrl-C in the terminal is for the demo, which ends them in order
            )  # fmt: skip

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.home / f"{name}.log"


STEP_S = "DIGITS_STEP_S"  # the variable by which the example's task sleeps in each step
SLOW_STEP_S = 0.01  # 50 local steps then take half a second longer than those of other clients
AWAY_S = 1.5


def names_of(count: int) -> list[str]:
    """Return the names of this many clients."""
    return [f"client-{number}" for number in range(1, count + 1)]


def roles(names: list[str]) -> tuple[str, str]:
    """Return (slow client, killed client), two different ones if there are two."""
    return names[-1], names[len(names) // 2 - 1 if len(names) > 1 else 0]


@dataclass
class Disturbance:
    """Kills `victim` when round `at` opens and starts it again `AWAY_S` later."""

    victim: str
    at: int
    kill: Callable[[str], None]
    start: Callable[[str], None]
    killed_at: float | None = None
    back: bool = False  # it was started again
    replied: bool = False  # since then

    def hear(self, event: Event) -> list[str]:
        """Handle an event of the run and return the lines to print; the opening of round `at` kills the victim."""
        from thinwire.core.events import ClientReconnected, RoundOpened, UpdateAccepted
        from thinwire.core.run_events import PhaseClosed

        if self.back:
            came = isinstance(event, ClientReconnected | UpdateAccepted) and event.device == self.victim
            came = came or (isinstance(event, PhaseClosed) and self.victim in event.received)
            self.replied = self.replied or came
        if not isinstance(event, RoundOpened) or event.round != self.at or self.killed_at is not None:
            return []
        self.kill(self.victim)
        self.killed_at = time.monotonic()
        return [f"       {self.victim} is killed (kill -9) in round {self.at}"]

    def look(self, now: float) -> list[str]:
        """Start the victim again if it was down for `AWAY_S`, and return the lines to print."""
        if self.killed_at is None or self.back or now - self.killed_at < AWAY_S:
            return []
        self.back = True
        self.start(self.victim)
        return [f"       {self.victim} is started again"]

    def end(self) -> list[str]:
        """Return the lines to print when the run has ended: quick rounds may be over before the victim has started."""
        if self.killed_at is None or self.replied:
            return []
        return [f"       {self.victim} was not back yet when the run ended"]
