"""The demo from its first process to its table."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import say
from thinwire.cli.interrupts import remembered
from thinwire.cli.live import example, machine
from thinwire.cli.live.crowd import Crowd, undisturbed
from thinwire.cli.live.disturbance import SLOW_STEP_S, Disturbance, names_of, roles
from thinwire.cli.live.summary import document, tell_table
from thinwire.cli.places import again, opened
from thinwire.cli.runs.follow import screen
from thinwire.cli.runs.rounds import Teller

if TYPE_CHECKING:
    from thinwire.core import RunPlan

LOOK_S = 0.1
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Tell = Callable[[str], None]


def show(clients: int, rounds: int, seed: int, *, browse: bool, stay: bool, json: bool) -> int:
    """Run all of it; gives the exit code of the run. No process is left behind, whatever happens."""
    count = clients or machine.client_count(machine.free_bytes())
    plan, began = example.plan_of(rounds, seed, count), time.monotonic()
    with folder() as home, remembered(*ENDS) as look, Crowd(home) as crowd:
        page = _open(crowd, home, browse)
        run_id, code = _run(crowd, home, plan, count, look)
        found: dict[str, Any] = {"clients": count, "home": str(home), "dashboard_url": f"http://{page}/runs/{run_id}"}
        if code == 0:
            found |= _baselines(plan, count)
        with opened(home) as store:
            found = document(store, run_id) | found
        found |= {"wall_s": time.monotonic() - began, "versions": machine.versions()}
        if json:
            say.document(found)
            say.note(_kept(home))
        else:
            tell_table(found)
        if stay and code == 0 and say.on_terminal():
            _stay()
    return code


@contextmanager
def folder() -> Iterator[Path]:
    """The demo's state folder: kept for who looks at its run or at what went wrong, removed where it was broken off."""
    home = Path(tempfile.mkdtemp(prefix="thinwire-demo-"))
    try:
        yield home
    except KeyboardInterrupt:
        with undisturbed():
            shutil.rmtree(home, ignore_errors=True)
        say.note(f"broken off; {home} is removed")
        raise
    except Exception:
        say.note(_kept(home))
        raise


def _kept(home: Path) -> str:
    return f"its state and its logs are kept in {home}; to remove them: rm -r {shlex.quote(str(home))}"


def _open(crowd: Crowd, home: Path, browse: bool) -> str:
    """Start the aggregator and say where its page is, before anything else happens."""
    from thinwire.cli.aggregator.serving import login_url

    about = crowd.aggregator()
    with opened(home, read_only=False) as store:
        url = login_url(about["page"], store.new_login_code())
    if sys.stderr.isatty():
        say.note(f"page     {url}")
    else:  # what is not read by a person now is kept somewhere
        say.note(f"page     http://{about['page']}    (to log in: {again('aggregator status --login', home)})")
    say.note(f"state    {home}")
    if browse and machine.has_desktop():
        webbrowser.open(url)
    return str(about["page"])


def _run(crowd: Crowd, home: Path, plan: RunPlan, count: int, look: Callable[[], None]) -> tuple[str, int]:
    """Start the clients, hand the run over and follow it, disturbed half-way."""
    from thinwire.cli.handover import hand_over

    threads, names = machine.thread_count(count), names_of(count)
    slow, victim = roles(names)
    file = example.digits()

    def start(name: str) -> None:
        part = f"{names.index(name)}/{count}"
        given = ["--aggregator", crowd.door, "--task", f"{plan.run.task}={file / 'task.py'}", "--partition", part]
        given += ["--split", example.SPLIT, "--seed", str(plan.run.seed), "--threads", str(threads)]
        crowd.client(name, given + (["--slow-step", str(SLOW_STEP_S)] if name == slow else []))

    for name in names:
        start(name)
    say.note(f"clients  {count} processes, {threads} torch thread{'s' if threads > 1 else ''} each; {slow} is slow")
    with opened(home, read_only=False) as store:
        run_id = hand_over(store, home, plan, file / "plan.toml", None)
        disturbance = Disturbance(victim, max(1, plan.run.rounds // 2), crowd.kill, start)
        teller, seen = Teller(), 0
        with screen() as (tell, update):
            while not teller.over:
                for seq, event in store.events(run_id, after=seen):
                    seen = seq
                    for line in [*teller.hear(event), *teller.then(disturbance.hear(event))]:
                        tell(line)
                for line in teller.then(disturbance.look(time.monotonic())):
                    tell(line)
                look()
                _all_alive(crowd)
                update(f"{run_id}: {teller.now}")
                time.sleep(LOOK_S)
            tell(f"{run_id} {teller.status}: {teller.text}")
    return run_id, teller.exit_code


def _all_alive(crowd: Crowd) -> None:
    from thinwire.core.errors import ThinwireError

    if dead := crowd.dead():
        raise ThinwireError(
            f"{dead[0]} ended by itself", why=crowd.last_words(dead[0]), hint=f"its log: {crowd.log(dead[0])}"
        )


def _baselines(plan: RunPlan, count: int) -> dict[str, Any]:
    """What it is compared with, really trained: the same run uncompressed, and all data in one place."""
    found: dict[str, Any] = {}
    with screen() as (tell, update):
        for name, train in (("uncompressed", example.uncompressed), ("centralised", example.centralised)):
            update(f"for comparison: {name} ({'simulated in this process' if name == 'uncompressed' else 'one place'})")
            began = time.monotonic()
            accuracy = train(plan, count)["accuracy"]
            tell(f"for comparison: {name} accuracy {accuracy:.4f} after {time.monotonic() - began:.1f} s")
            found[f"accuracy_{name}"] = accuracy
    return found


def _stay() -> None:
    """Keep the page up until Ctrl-C."""
    say.note("the page stays up until Ctrl-C")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        say.note("")
