"""A process of ours at the other end of a socket: what it prints is kept in a bounded log; it can always be ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.client.compute.wire import BadFrame, Wire
from thinwire.client.disk.logbook import append_all
from thinwire.client.failures import CannotAnswer
from thinwire.client.training.interpreter import Interpreter
from thinwire.core.types import Vector

LOG = "worker.log"
MOST_LOG = 1 << 20  # bytes of each of the two
ENDS_S = 5.0  # how long it may take to end by itself


class Broken(CannotAnswer):
    """The process is gone, by itself or by us, and with it the ask that it was at."""

    def __init__(self, why: str) -> None:
        super().__init__("worker", why)


class Child:
    """It inherits one end of a socket and nothing else. A session of its own: what it starts is ended with it.

    Law: whatever it does or says, a call gives what it says or raises `Broken`, and after `Broken` it is no more.
    """

    def __init__(self, interpreter: Interpreter, folder: Path, takes_s: float) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(takes_s)  # for a head or a vector that has begun, either way
        with theirs:
            try:
                self.process = subprocess.Popen(
                    interpreter.command(theirs.fileno()),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),), start_new_session=True, env=dict(interpreter.environment),
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise Broken(f"it cannot be started: {error.strerror}") from error
        self._wire, self._folder = Wire(ours), folder
        self._log = threading.Thread(target=self._keep_log, daemon=True, name="worker's log")
        self._log.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, head: Mapping[str, Any], *vectors: Vector) -> None:
        with self.held_to_account():
            self._wire.send(head, *vectors)

    def hear(self, wait_s: float) -> dict[str, Any] | None:
        """What it says next; None when it says nothing for so long."""
        with self.held_to_account():
            if not select.select([self._wire.sock], [], [], wait_s)[0]:
                return None
            return self._wire.head()

    def vectors(self, head: Mapping[str, Any], sizes: Sequence[int]) -> list[Vector]:
        """Those that come with the head, when they have these sizes."""
        with self.held_to_account():
            return self._wire.vectors(head, sizes)

    @contextlib.contextmanager
    def held_to_account(self) -> Iterator[None]:
        """What cannot be understood ends it; what it died of is said in our words."""
        try:
            yield
        except EOFError:
            raise Broken(died(self._reaped(ENDS_S))) from None
        except (BadFrame, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            self.kill()
            raise Broken("it said what cannot be") from error
        except TimeoutError as error:
            self.kill()
            raise Broken("it stopped in the middle of a word") from error

    def close(self) -> None:
        """Kindly: it sees that we are gone. Then not."""
        self._wire.sock.close()
        self._log.join(ENDS_S)  # until nothing that it started can print any more
        self._reaped(0.0)

    def kill(self) -> None:
        self._reaped(0.0)

    def _reaped(self, wait_s: float) -> int:
        self._wire.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if wait_s:
                self.process.wait(wait_s)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def _keep_log(self) -> None:
        assert self.process.stdout is not None
        append_all(self.process.stdout, self._folder / LOG, MOST_LOG)


def died(code: int) -> str:
    """What an exit code says of a process.

    >>> died(-9), died(3)
    ('killed by SIGKILL: perhaps there was no memory left', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"killed by {name}" + (": perhaps there was no memory left" if name == "SIGKILL" else "")
    return f"killed by signal {-code}"
