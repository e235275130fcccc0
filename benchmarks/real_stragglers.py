"""Unequal devices as processes: an aggregator and six clients on this machine, one ten times slower, one killed.

Each client sleeps after every step, so that a step costs what a small board takes and six share two cores. A
killed client's connection closes, which the aggregator knows after 4 s: waiting for all loses less by it than by one
that falls silent.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from benchmarks.curve import Curve, points_of
from benchmarks.processes import Processes, free_port
from thinwire.client import ClientInfo
from thinwire.client.task import initial_model, load_task, report
from thinwire.core import RunPlan
from thinwire.core.statedir import AggregatorHome, holder
from thinwire.server.model_store import Versions
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Training
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.store import Store

CLIENTS, SLOW, KILLED = 6, 0, 5
KILLED_IN = 3  # the round
SLOWER = 10.0
WITHIN_S = 600.0
ENDED = ("done", "failed", "stopped")


def run(plan: RunPlan, task: str, split: str, step_s: float, folder: Path) -> Curve:
    """A plan from the start of all processes to the end of its run; seconds are the aggregator's own."""
    home, listen = AggregatorHome.under(folder / "home"), f"127.0.0.1:{free_port()}"
    with Processes(folder) as processes:
        where = ["--home", str(folder / "home")]
        processes.start("aggregator", thinwire("aggregator", "start", *where, "--listen", listen, "--no-dashboard"))
        processes.until(lambda: "listen" in (holder(home.lock) or {}), 60, "the aggregator serves")
        pids = [
            processes.start(f"client-{index}", thinwire(
                "client", "start", *where, "--aggregator", f"http://{listen}", "--task", task,
                "--name", f"client-{index}", "--partition", f"{index}/{CLIENTS}", "--split", split,
                "--seed", str(plan.run.seed), "--threads", "1",
            ), {"DIGITS_STEP_S": f"{step_s * (SLOWER if index == SLOW else 1):g}"})
            for index in range(CLIENTS)
        ]  # fmt: skip
        with Store.open(home.database) as store:
            return _driven(plan, task, split, store, home, processes, pids[KILLED])


def thinwire(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "thinwire.cli", *arguments]


def _driven(
    plan: RunPlan, spec: str, split: str, store: Store, home: AggregatorHome, processes: Processes, victim: int
) -> Curve:
    task = load_task(spec)
    first = initial_model(task, plan.run.seed)
    run_id = submit(
        store, home, plan, FirstModel(first.layout, report(task), first.vector, first.buffers, first.counters)
    )
    processes.until(lambda: len(store.rounds(run_id)) >= KILLED_IN, WITHIN_S, f"round {KILLED_IN}")
    os.kill(victim, signal.SIGKILL)
    processes.ended(victim, 10.0)
    processes.until(lambda: store.run(run_id).status in ENDED, WITHIN_S, f"the end of {run_id}")
    row, events = store.run(run_id), tuple(event for _, event in store.events(run_id))
    if row.status != "done":
        raise RuntimeError(f"{run_id} is {row.status}: {row.status_text}")
    training = Training(task, ClientPopulation(home.root, ClientInfo(split=split, seed=plan.run.seed), CLIENTS))
    return Curve(points_of(events, Versions(home.run(run_id), first.layout), training), events)
