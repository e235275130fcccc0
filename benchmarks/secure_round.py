"""Measure what secure aggregation adds to the time of a round: one plan plain and secure, by turns, on real processes.

    python -m benchmarks.secure_round [--preset tiny|small|full] --json

An aggregator and its clients are processes as people start them, over the device API on loopback. Training is a fixed
wait (`benchmarks/wait_task.py`), so it takes no processor time, and what a round takes beyond the wait is the work of
the system. A turn is one run without and one run with `[secure] enabled = true`, of the same clients. The round's
seconds are from the close of the round before it to its own close; the first round of a run, in which plans and plugins
are loaded, does not count.

A row is one round. Of a secure round it also has, in seconds since the round was opened, the close of each phase
(`advertise_s` to `unmask_s`), `sum_s` (from the last answer to `unmask` to the sum), and `share_margin_s`: by how much
`share` closed before the wait of a client that had begun at the round's opening would have ended. A positive margin
shows that `share` ended before training did, since no client can begin earlier. `requests` is what a client sent to the
device API, mean over the clients: what it sent between its masked update (or plain update) of the round before and
that of this round, polls and parts of files included.

Figures: `round_slowdown` is the median secure round over the median plain round. `secure_s` and `plain_s` are these
medians, `secure_spread_s` and `plain_spread_s` the largest less the smallest. `share_margin_s` is the smallest margin,
`requests_secure` and `requests_plain` are medians, and `PHASE_s` is the median time from the phase before it, in
`masked_s` without the wait. `cpu_s_secure` and `cpu_s_plain` are processor seconds of all processes a round.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.document import note
from benchmarks.entry import Measured, run_in_folder
from benchmarks.processes import Processes, cpu_seconds, descendants, free_port
from benchmarks.wait_task import COLUMNS, PARAMS, WAIT
from thinwire.cli.main import main
from thinwire.core import Layout, RunPlan
from thinwire.core.events import Event, RoundClosed
from thinwire.core.fleet import TaskReport
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.core.statedir import AggregatorHome, holder
from thinwire.core.types import PHASES
from thinwire.server.submit import FirstModel, submit
from thinwire.store import Store
from thinwire.transport.server.app import DeviceApi, Request

WITHIN_S = 300.0
DEADLINE_S = 120.0
TASK = Path(__file__).parent / "wait_task.py"
ENDED = ("done", "failed", "stopped")
COUNTED = "from benchmarks.secure_round import counted; counted()"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


@dataclass(frozen=True)
class Preset:
    """`rounds` are those of one run, of which the first one does not count; `wait_s` replaces training."""

    clients: int
    params: int
    wait_s: float
    rounds: int
    turns: int


PRESETS = {
    "tiny": Preset(3, 20_000, 0.1, 2, 1),
    "small": Preset(8, 1_000_000, 1.0, 4, 1),
    "full": Preset(8, 1_000_000, 5.0, 10, 2),
}


class Clients:
    """An aggregator and clients that have found it, and wait for a run. They end with `processes`."""

    def __init__(self, preset: Preset, folder: Path, processes: Processes) -> None:
        self.preset, self.processes = preset, processes
        self.home, listen = AggregatorHome.under(folder / "home"), f"127.0.0.1:{free_port()}"
        env = ONE_THREAD | {PARAMS: str(preset.params), WAIT: f"{preset.wait_s:g}"}
        where = ("--home", str(folder / "home"))
        words = ("aggregator", "start", *where, "--listen", listen, "--no-dashboard")
        self.served = folder / "served"
        self.pids = [processes.start("aggregator", [sys.executable, "-c", COUNTED, str(self.served), *words], env)]
        processes.until(lambda: "listen" in (holder(self.home.lock) or {}), WITHIN_S, "the aggregator serves")
        for number in range(preset.clients):
            name, task = f"client-{number}", ("--task", f"wait={TASK}", "--threads", "1")
            command = _thinwire("client", "start", *where, "--aggregator", f"http://{listen}", "--name", name, *task)
            self.pids.append(processes.start(name, command, env))
        self.store = Store.open(self.home.database)
        processes.until(lambda: self._online() == preset.clients, WITHIN_S, "all clients are there")

    def run(self, secure: bool) -> list[dict[str, Any]]:
        """Run one plan to its end, and return a row for each round but the first."""
        layout = Layout.of({"weight": (self.preset.params // COLUMNS, COLUMNS)})
        params, nothing = np.zeros(layout.size, np.float32), np.zeros(0, np.float32)
        report, before = TaskReport("wait", layout_digest=layout.digest), self._cpu_s()
        run_id = submit(
            self.store, self.home, plan_of(self.preset, secure), FirstModel(layout, report, params, nothing)
        )
        within_s = WITHIN_S + self.preset.rounds * self.preset.wait_s
        self.processes.until(lambda: self.store.run(run_id).status in ENDED, within_s, f"the end of {run_id}")
        row, events = self.store.run(run_id), [event for _, event in self.store.events(run_id)]
        aggregated = [update for update in self.store.updates(run_id) if update.outcome == "aggregated"]
        if row.status != "done" or len(aggregated) != self.preset.rounds * self.preset.clients:
            raise RuntimeError(f"{run_id} is {row.status}: {row.status_text}; {len(aggregated)} updates aggregated")
        cpu_s = (self._cpu_s() - before) / self.preset.rounds
        rows = rounds_of(events, self.preset.wait_s)
        requests = [self._requests(row.pop("from"), row.pop("to")) for row in rows]
        return [{"secure": secure, **row, **of, "cpu_s": cpu_s} for row, of in zip(rows, requests, strict=True)]

    def _requests(self, begins: float, ends: float) -> dict[str, Any]:
        """Return the requests between two moments (wall clock), a client: all of them, and by route."""
        lines = [line.split() for line in self.served.read_text().splitlines()]
        routes = Counter(route for at, route in lines if begins <= float(at) < ends)
        of_one = {route: count / self.preset.clients for route, count in sorted(routes.items())}
        return {"requests": sum(of_one.values()), "routes": of_one}

    def _online(self) -> int:
        return sum(info.online for info in self.store.devices())

    def _cpu_s(self) -> float:
        return sum(cpu_seconds(each) for pid in self.pids for each in descendants(pid))


def plan_of(preset: Preset, secure: bool) -> RunPlan:
    """Return the plan of one run; the two differ in [secure] and in nothing else."""
    return RunPlan.from_json(
        {
            "run": {"task": "wait", "rounds": preset.rounds, "evaluate": "off"},
            "cohort": {"wait_for": preset.clients, "deadline_s": DEADLINE_S, "late": "drop"},
            "local": {"lr": 1.0, "steps": 1, "buffers": "local"},
            **({"secure": {"enabled": True}} if secure else {}),
        }
    )


def rounds_of(events: Sequence[Event], wait_s: float) -> list[dict[str, Any]]:
    """Return the seconds of each round but the first one, and of the phases that it has, from a run's journal.

    `from` and `to` are its beginning and its end by the wall clock.
    """
    phases = {(event.round, event.phase): event.elapsed_s for event in events if isinstance(event, PhaseClosed)}
    sums = {event.round: event.elapsed_s for event in events if isinstance(event, SumUnmasked)}
    closed = [event for event in events if isinstance(event, RoundClosed)]
    rows = []
    for before, event in pairwise(closed):
        number = event.round
        row: dict[str, Any] = {"round": number, "seconds": event.elapsed_s - before.elapsed_s}
        row |= {"from": before.at, "to": event.at}
        if number in sums:
            row |= {f"{phase}_s": phases[number, phase] for phase in PHASES}
            row |= {"sum_s": sums[number] - phases[number, "unmask"], "share_margin_s": wait_s - row["share_s"]}
        rows.append(row)
    return rows


def counted() -> None:
    """Run the command line of an aggregator, and append each request that its device API serves to a file.

    The arguments are the file and the command's words; a line is the wall clock at which the request began, and its
    route.
    """
    served = open(sys.argv[1], "a", buffering=1)  # noqa: SIM115  # until the process ends
    serve = DeviceApi.__call__

    async def written(self: DeviceApi, scope: Any, receive: Any, send: Any) -> None:
        served.write(f"{time.time()} {Request(scope, receive, send).route}\n")
        await serve(self, scope, receive, send)

    DeviceApi.__call__ = written  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))


def measure(preset: Preset, folder: Path) -> Measured:
    rows = list[dict[str, Any]]()
    with Processes(folder) as processes:
        clients = Clients(preset, folder, processes)
        try:
            for turn in range(preset.turns):
                for secure in (False, True):
                    found = clients.run(secure)
                    told = median(row["seconds"] for row in found)
                    note(f"turn {turn + 1}, {'secure' if secure else 'plain'}: {told:.2f} s a round")
                    rows += [{"turn": turn + 1, **row} for row in found]
        finally:
            clients.store.close()
    return rows, figures(rows, preset.wait_s)


def figures(rows: Sequence[Mapping[str, Any]], wait_s: float) -> dict[str, float]:
    """Return what the rounds come to; every secure round counts in `share_margin_s`."""
    found = dict[str, float]()
    for name, secure in (("plain", False), ("secure", True)):
        mine = [row for row in rows if row["secure"] is secure]
        seconds = [row["seconds"] for row in mine]
        found |= {f"{name}_s": median(seconds), f"{name}_spread_s": max(seconds) - min(seconds)}
        found |= {f"requests_{name}": median(row["requests"] for row in mine)}
        found |= {f"cpu_s_{name}": median(row["cpu_s"] for row in mine)}
    secured = [row for row in rows if row["secure"]]
    for before, phase in pairwise(("", *PHASES)):
        took = [row[f"{phase}_s"] - (row[f"{before}_s"] if before else 0.0) for row in secured]
        found[f"{phase}_s"] = median(took)
    found["masked_s"] = median(row["masked_s"] for row in secured) - wait_s
    return {
        "round_slowdown": found["secure_s"] / found["plain_s"],
        "share_margin_s": min(row["share_margin_s"] for row in secured),
        **found,
        "sum_s": median(row["sum_s"] for row in secured),
    }


def _thinwire(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire.cli", *words]


if __name__ == "__main__":
    run_in_folder("secure_round", __doc__, PRESETS, measure)
