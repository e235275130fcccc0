"""Measure what a long run takes in the dashboard: time to the first curve, frames, memory, CPU and bytes.

    python -m benchmarks.page [--preset tiny|small|full] --json

The runs are recorded ones (`recipe.py`): *long* has 10 000 rounds with 20 of 1 000 clients, *wide* 800 rounds with 200
clients. `small` has fewer rounds. Each figure is the worse one of both runs; the rows have each.

| figure | meaning |
|---|---|
| `cold_first_curve_ms` | navigation to the first drawn curve, a new dashboard process, empty cache |
| `first_load_kb` | bytes of that load on the network |
| `frame_p95_ms` | time between two frames while four replies a second are recorded |
| `live_core_share` | CPU of the dashboard process meanwhile, one tab |
| `dashboard_rss_mb` `js_heap_mb` | peak memory of that process; its JavaScript objects after that |
| `query_p95_ms` | a read over HTTP: whole, changes only, a page of rounds and of clients, an early round |
| `runs_show_why_s` | `thinwire runs show --why`, the whole command |
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.document import note
from benchmarks.entry import Measured, run_in_folder, timed_ms
from benchmarks.page.recipe import LONG, SMALL, WIDE, Recipe, Teller, filled
from benchmarks.page.visit import Visit, chromium, p95
from benchmarks.processes import TICK_S
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store

ROOT = Path(__file__).parents[2]
READY_S = 60.0


@dataclass(frozen=True)
class Preset:
    """The runs, for how long each is followed, and how often each read is repeated."""

    recipes: tuple[Recipe, ...]
    live_s: float
    reads: int
    commands: int = 3


PRESETS = {
    "tiny": Preset(SMALL[1:], 1.0, 2, 1),
    "small": Preset(SMALL, 10.0, 20),
    "full": Preset((LONG, WIDE), 30.0, 40, 5),
}


def measure(preset: Preset, folder: Path) -> Measured:
    """Visit each run."""
    rows = [{"run": recipe.name, **_of(recipe, preset, folder / recipe.name)} for recipe in preset.recipes]
    return rows, {name: max(float(row[name]) for row in rows) for name in rows[0] if name not in ("run", "requests")}


def _of(recipe: Recipe, preset: Preset, folder: Path) -> dict[str, Any]:
    home = AggregatorHome.under(folder)
    filled(recipe, home.database)
    with Store.open(home.database, durable=False) as store:
        run_id = store.run("latest").run_id
        with Dashboard(home.database) as dashboard, chromium() as browser:
            visit = Visit(browser, dashboard.url, store.logins.new_code(), run_id)
            found: dict[str, Any] = {"cold_first_curve_ms": visit.open()}
            visit.page.wait_for_timeout(500)
            found |= {"first_load_kb": visit.bytes / 1000, "requests": visit.requests}
            before, began = dashboard.cpu_s(), time.monotonic()
            frames = visit.follow(Teller.resume(store, recipe), preset.live_s)
            share = (dashboard.cpu_s() - before) / (time.monotonic() - began)
            found |= {"frame_p95_ms": p95(frames), "live_core_share": share, "js_heap_mb": visit.heap_mb()}
            visit.close()
            found["query_p95_ms"] = p95(_reads(dashboard.url, store.logins.new_code(), run_id, preset.reads))
            found["dashboard_rss_mb"] = dashboard.peak_mb()
    words = [sys.executable, "-m", "thinwire.cli", "runs", "show", run_id, "--why", "--home", str(folder)]
    shown = [timed_ms(lambda: subprocess.run(words, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)) / 1000]
    for _ in range(preset.commands - 1):
        shown.append(timed_ms(lambda: subprocess.run(words, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)) / 1000)
    found["runs_show_why_s"] = median(shown)
    note(f"{recipe.name}: {found}")
    return found


def _reads(url: str, code: str, run_id: str, times: int) -> list[float]:
    """Return the milliseconds of each read."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opener.open(urllib.request.Request(f"{url}/login", data=f"code={code}".encode(), headers={"Origin": url})).read()
    opener.addheaders = [("Accept-Encoding", "gzip")]

    def get(path: str) -> bytes:
        with opener.open(f"{url}/api/v1/runs/{run_id}/{path}") as answer:
            return bytes(answer.read())

    paths = (
        "view?client=0",
        f"view?since={2**40}&held=1",
        "round-summaries?from=1&to=50",
        "clients?client=0",
        "rounds/2",
    )
    return [timed_ms(lambda path=path: get(path)) for _ in range(times) for path in paths]  # type: ignore[misc]


class Dashboard:
    """The dashboard as a new process on a database."""

    def __init__(self, database: Path) -> None:
        words = ["-m", "thinwire.web", "--database", str(database), "--listen", "127.0.0.1:0"]
        command = [sys.executable, *words, "--parent", str(os.getpid())]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.url = f"http://{self._process.stdout.readline().split()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(READY_S)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process until now."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def peak_mb(self) -> float:
        """Return the largest resident memory of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1000


if __name__ == "__main__":
    run_in_folder("page", __doc__, PRESETS, measure)
