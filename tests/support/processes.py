"""Real processes of `thinwire` in a home of their own: started, watched through the store, killed by pid, all ended."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port
from tests.support.fork_server import Forked, run_forked
from thinwire.aggregation import codecs
from thinwire.cli.aggregator.dashboard import end_running
from thinwire.cli.local_state import alive
from thinwire.cli.main import main
from thinwire.cli.params import overrides
from thinwire.cli.run import hand_over
from thinwire.core import RunPlan
from thinwire.core.events import Event
from thinwire.core.statedir import AggregatorHome
from thinwire.store import RunRow, Store

PATIENCE_S = 90.0  # nothing takes that long: it only ends a test that would hang
THINWIRE = ("thinwire.cli",)
EXAMPLE = Path(__file__).parents[1] / "system" / "digits"
THE_DEMOS = Path(__file__).parents[2] / "examples" / "digits"  # with sklearn


class Wait:
    """What the looks of one wait share: the store, which is opened at the first look, and the events read so far."""

    def __init__(self, opened: Callable[[], Store]) -> None:
        self._opened = opened
        self._read: dict[str, list[tuple[int, Event]]] = {}

    @functools.cached_property
    def store(self) -> Store:
        return self._opened()

    def events(self, run_id: str) -> list[Event]:
        read = self._read.setdefault(run_id, [])
        read += self.store.events(run_id, read[-1][0] if read else 0)
        return [event for _, event in read]


class Site:
    """One home, one device API; `close` ends whatever was started here. `inside`: as for `start`, of the aggregator."""

    def __init__(self, home: Path, inside: tuple[str, ...] = ()) -> None:
        self.home, self.inside = home, inside
        self.listen, self.dashboard_at = (f"127.0.0.1:{port}" for port in (free_port(), free_port()))
        self.example = EXAMPLE  # the folder of the task and its plan
        self.page: tuple[str, ...] = ("--no-dashboard",)
        self.forks = True  # False: each process imports for itself
        self.more: dict[str, str] = {}  # environment of the processes that are started
        self.aggregator_program: Sequence[str] = THINWIRE
        self.processes: list[subprocess.Popen[bytes]] = []
        self.aggregator: subprocess.Popen[bytes] | None = None
        self._wait: Wait | None = None

    def start_aggregator(self, *more: str) -> subprocess.Popen[bytes]:
        """Begin it, and wait until it serves."""
        begun = self.begin_aggregator(*more)
        self.until(lambda: self.serving().get("pid") == begun.pid, "the aggregator serves")
        return begun

    def begin_aggregator(self, *more: str) -> subprocess.Popen[bytes]:
        words = ("aggregator", "start", "--listen", self.listen, *self.page, *more)
        self.aggregator = self.start(*words, inside=self.inside, program=self.aggregator_program)
        return self.aggregator

    def serving(self) -> dict[str, Any]:
        """What the aggregator says of itself since it serves; nothing before."""
        assert self.aggregator is None or self.aggregator.poll() is None, self.said()
        return alive(self.home) or {}

    def start_client(
        self,
        name: str,
        part: int = 0,
        parts: int = 1,
        *more: str,
        at: str = "",
        program: Sequence[str] = THINWIRE,
        step_s: float = 0.0,
    ) -> subprocess.Popen[bytes]:
        """`at` is the address to connect to if it is not the aggregator's own; a step takes `step_s` longer."""
        return self.start(
            "client", "start", "--aggregator", f"http://{at or self.listen}", "--name", name,
            "--task", f"digits={self.example / 'task.py'}", "--partition", f"{part}/{parts}", *more,
            program=program, step_s=step_s,
        )  # fmt: skip

    def start(
        self,
        *arguments: str,
        inside: tuple[str, ...] = (),
        home: Path | None = None,
        program: Sequence[str] = THINWIRE,
        step_s: float = 0.0,
    ) -> subprocess.Popen[bytes]:
        """A process of `thinwire`; `inside` is what its command is begun with where it runs on another machine."""
        log = open(self.home.parent / f"log-{len(self.processes)}.txt", "wb")  # noqa: SIM115  # the process holds it
        process = (Forked if self.forks else subprocess.Popen)(
            [*inside, sys.executable, "-m", *program, *arguments, "--home", str(home or self.home)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**environment(), "DIGITS_STEP_S": str(step_s), **self.more},
        )  # fmt: skip
        log.close()
        self.processes.append(process)
        return process

    def call(
        self, *arguments: str, home: Path | None = None, inside: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        command = [*inside, sys.executable, "-m", "thinwire.cli", *arguments, "--home", str(home or self.home)]
        if self.forks:
            return run_forked(command, PATIENCE_S, env=environment())
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), check=False
        )

    def typed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command in this process, which has imported what it needs: one that looks, or writes into the store."""
        words, out, err = [*arguments, "--home", str(self.home)], io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def begin(self, *sets: str) -> str:
        """Hand over the example's plan, as `thinwire run --detach` does in a process of its own, which imports torch
        first; gives the run's id.
        """
        file = self.example / "plan.toml"
        plan = RunPlan.load(file, overrides(list(sets)))
        assert plan.check(codecs) == []
        with self.store() as store:
            return hand_over(store, self.home, plan, file, None)

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        return (self.home.parent / f"log-{self.processes.index(process)}.txt").read_text()

    def run(self, run_id: str) -> RunRow:
        with self._open() as store:
            return store.run(run_id)

    def events(self, run_id: str) -> list[Event]:
        if self._wait is not None:
            return self._wait.events(run_id)
        with self.store() as store:
            return [event for _, event in store.events(run_id)]

    def _open(self) -> contextlib.AbstractContextManager[Store]:
        """The store, which is opened once for all looks of a wait."""
        return self.store() if self._wait is None else contextlib.nullcontext(self._wait.store)

    def store(self) -> Store:
        return Store.open(self.home / "aggregator" / "store.sqlite3")

    def until(self, true: Callable[[], object], what: str = "what was waited for") -> None:
        """Wait for a condition, not for a time."""
        end = time.monotonic() + PATIENCE_S
        with contextlib.ExitStack() as opened:
            self._wait = Wait(lambda: opened.enter_context(self.store()))
            opened.callback(setattr, self, "_wait", None)
            while not true():
                assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:g} s\n{self.said()}"
                time.sleep(0.05)

    def until_event(self, run_id: str, kind: type[Event], /, count: int = 1, **having: Any) -> None:
        def seen() -> bool:
            found = [e for e in self.events(run_id) if isinstance(e, kind)]
            return sum(all(getattr(e, k) == v for k, v in having.items()) for e in found) >= count

        self.until(seen)

    def until_done(self, run_id: str) -> RunRow:
        self.until(lambda: self.run(run_id).status in ("done", "failed", "stopped"), f"{run_id} ends")
        return self.run(run_id)

    def said(self) -> str:
        return "\n".join(f"--- {p.args!r}\n{self.log_of(p)[-2000:]}" for p in self.processes)

    def online(self) -> set[str]:
        with self._open() as store:
            return {device.row.name for device in store.devices() if device.online}

    def close(self) -> None:
        self.end(self.processes)
        end_running(AggregatorHome(self.home / "aggregator"))  # the dashboard outlives an aggregator that was killed

    def end(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        ending = list(processes)
        for process in ending:
            if process.poll() is None:
                process.terminate()
        for process in ending:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """As a power cut would."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def shared_site(folder: Path, *, dashboard: bool = False, forks: bool = True) -> Iterator[Site]:
    """A site with an aggregator and the client pi-a, which several tests share and none ends."""
    site = Site(folder / "home")
    site.forks = forks
    if dashboard:
        site.page = ("--dashboard", site.dashboard_at)
    try:
        site.start_aggregator()
        site.start_client("pi-a", 0, 2)
        yield site
    finally:
        site.close()


@contextlib.contextmanager
def only_pi_a(site: Site) -> Iterator[Site]:
    """A shared site where only pi-a is online; the clients that a test starts there are ended behind it."""
    before = len(site.processes)
    site.until(lambda: site.online() == {"pi-a"}, "only pi-a is online")
    yield site
    site.end(process for process in site.processes[before:] if process is not site.aggregator)
