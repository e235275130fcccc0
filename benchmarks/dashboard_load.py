"""Measure what many readers of the dashboard cost: answers, events, and the training of four runs at once.

    python -m benchmarks.dashboard_load [--preset tiny|small|full] --json

An aggregator and its clients are real processes; four runs train on the same clients. Each pair is the same four runs
twice, one time with nobody at the dashboard and one time with readers of the event streams and pages in Chromium, in
turns. Seconds are CPU seconds of the aggregator and of the clients with what they started, not of the dashboard. The
clients are slower than the machine, as devices are: they wait 20 ms at each local step.

| figure | meaning |
|---|---|
| `request_p95_ms` | an answer over HTTP to one who reads runs, views and alerts meanwhile |
| `event_delay_p95_ms` | from an event's own time until a reader of its stream has it |
| `training_slowdown_percent` | CPU seconds with readers over those without, less one: the median of the pairs |
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.document import note
from benchmarks.entry import Measured, run_in_folder, timed_ms
from benchmarks.page.visit import chromium, p95
from benchmarks.processes import cpu_seconds, descendants, free_port
from tests.support.processes import Site, environment
from thinwire.web.event_feed import READERS_OF_ONE

RUNS = 4
ASKED_S = 0.1  # between two requests of the one who reads over HTTP
STEP_S = 0.02  # that a client waits at each local step: else training keeps both cores busy, on which readers wait too


@dataclass(frozen=True)
class Preset:
    """The size of the load and of the work."""

    readers: int
    pages: int
    clients: int
    rounds: int
    pairs: int
    steps: int = 50  # of a client in a round
    forks: bool = False  # True: a process is forked from one that has imported what it needs


PRESETS = {
    "tiny": Preset(readers=8, pages=1, clients=2, rounds=2, pairs=1, steps=10, forks=True),
    "small": Preset(readers=40, pages=1, clients=2, rounds=5, pairs=1),
    "full": Preset(readers=200, pages=3, clients=4, rounds=10, pairs=5),
}


def measure(preset: Preset, folder: Path) -> Measured:
    """Run all pairs on one aggregator; the first four runs, which import and cache, are not counted."""
    site = Site(folder / "home")
    site.forks, site.page = preset.forks, ("--dashboard", f"127.0.0.1:{free_port()}")
    try:
        site.start_aggregator()
        for number in range(preset.clients):
            site.start_client(f"pi-{number}", number, preset.clients, "--threads", "1", step_s=STEP_S)
        site.until(lambda: len(site.online()) == preset.clients, "all clients are online")
        _until_over(site, _begun(site, preset, 1), {})
        rows = []
        for pair in range(preset.pairs):
            for loaded in (False, True) if pair % 2 == 0 else (True, False):
                rows.append({"pair": pair, "loaded": loaded, **_arm(site, preset, loaded)})
                note(f"pair {pair}, loaded {loaded}: {rows[-1]['cpu_s']:.2f} CPU seconds")
    finally:
        site.close()
    busy = {(row["pair"], row["loaded"]): float(row["cpu_s"]) for row in rows}
    ratios = [busy[pair, True] / busy[pair, False] for pair in range(preset.pairs)]
    read = [row for row in rows if row["loaded"]]
    return rows, {
        "request_p95_ms": max(float(row["request_p95_ms"]) for row in read),
        "event_delay_p95_ms": max(float(row["event_delay_p95_ms"]) for row in read),
        "training_slowdown_percent": 100 * (median(ratios) - 1),
        "lost_readers": sum(int(row["lost"]) for row in read),
    }


def _arm(site: Site, preset: Preset, loaded: bool) -> dict[str, Any]:
    """Run four runs at once, with or without readers, and return what was measured."""
    if not loaded:
        before = _spent(site)
        return {"cpu_s": _until_over(site, _begun(site, preset, preset.rounds), before)}
    address = site.page[1]
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(chromium()).new_context(viewport={"width": 1300, "height": 900})
        pages = [context.new_page() for _ in range(preset.pages)]
        pages[0].goto(f"http://{address}/login#{_code(site)}")
        pages[0].wait_for_selector("main h1")
        cookies = _cookies(site, address, preset.readers)
        before, runs = _spent(site), _begun(site, preset, preset.rounds)
        command = [sys.executable, "-m", "benchmarks.event_readers", address, str(preset.readers), *runs]
        readers = stack.enter_context(_readers(command, cookies, site.home.parent))
        for number, page in enumerate(pages):
            page.goto(f"http://{address}/runs/{runs[number % RUNS]}")
        asked = stack.enter_context(_asking(site, address, runs))
        spent = _until_over(site, runs, before)
        found = readers()
    return {
        "cpu_s": spent, "lost": found["lost"], "events": len(found["delays_s"]), "requests": len(asked),
        "request_p95_ms": p95(asked), "event_delay_p95_ms": 1000 * p95(found["delays_s"]),
    }  # fmt: skip


def _begun(site: Site, preset: Preset, rounds: int) -> list[str]:
    return [site.begin(f"run.rounds={rounds}", f"local.steps={preset.steps}") for _ in range(RUNS)]


def _until_over(site: Site, runs: list[str], before: Mapping[int, float]) -> float:
    """Wait until the runs are over; return the CPU seconds of aggregator and clients since `before`."""
    for run_id in runs:
        assert site.until_done(run_id).status == "done", site.said()
    after = _spent(site)
    return sum(after[pid] - before.get(pid, 0.0) for pid in after)


def _spent(site: Site) -> dict[int, float]:
    """Return the CPU seconds of each process of the aggregator and of the clients; the dashboard is not theirs."""
    found: dict[int, float] = {}
    for process in site.processes:
        own = [process.pid] if process is site.aggregator else list(descendants(process.pid))
        for pid in own:
            with contextlib.suppress(OSError):
                found[pid] = cpu_seconds(pid)
    return found


def _code(site: Site) -> str:
    with site.store() as store:
        return store.logins.new_code()


def _cookies(site: Site, address: str, readers: int) -> list[str]:
    """Return the cookie of each of as many users as so many readers need: the dashboard bounds those of one."""
    name, password = f"thinwire-{address.rpartition(':')[2]}", "the readers of a benchmark"
    with site.store() as store:
        there = {user.name for user in store.users.all()}
        users = [f"reader-{number}" for number in range(-(-readers // READERS_OF_ONE))]
        for user in users:
            if user not in there:
                store.users.add(user, "viewer", password, "benchmark")
        return [f"{name}={store.users.log_in(user, password)}" for user in users]


def _session(site: Site, address: str) -> CookieJar:
    """Return the cookies of a new session."""
    jar = CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    headers = {"Origin": f"http://{address}"}
    opener.open(urllib.request.Request(f"http://{address}/login", f"code={_code(site)}".encode(), headers)).read()
    return jar


@contextlib.contextmanager
def _asking(site: Site, address: str, runs: list[str]) -> Iterator[list[float]]:
    """Read over HTTP in a thread while the block runs; the list grows by the milliseconds of each answer."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(_session(site, address)))
    opener.addheaders = [("Accept-Encoding", "gzip")]
    paths = ["runs", "alerts", *(f"runs/{run_id}/view?client=0" for run_id in runs)]
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        number = 0
        while not over.wait(ASKED_S):
            path, number = paths[number % len(paths)], number + 1
            took.append(timed_ms(lambda path=path: opener.open(f"http://{address}/api/v1/{path}").read()))  # type: ignore[misc]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _readers(command: list[str], cookies: list[str], folder: Path) -> Iterator[Any]:
    """Start the readers; the yielded function ends them and returns what they have read."""
    env = environment()
    with open(folder / "readers.log", "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **env}
        )
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("end\n")
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))

    try:
        process.stdin.write(f"{json.dumps(cookies)}\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise RuntimeError((folder / "readers.log").read_text())
        yield end
    finally:
        process.terminate()
        process.wait()
        process.stdin.close()
        process.stdout.close()


if __name__ == "__main__":
    run_in_folder("dashboard_load", __doc__, PRESETS, measure)
