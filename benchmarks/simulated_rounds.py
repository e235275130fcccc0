"""Rounds of our own simulation, in a process of their own: what `benchmarks.simulation` holds against Flower's.

    python -m benchmarks.simulated_rounds noop|mlp CLIENTS ASKED ROUNDS PROCESSES

Prints one JSON line: seconds of each round, from the close of the one before, and the CPU seconds of this process. It
is what `thinwire.simulate` does.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from thinwire.client import ClientInfo
from thinwire.client.task import load_task
from thinwire.core import RunPlan
from thinwire.core.events import Event, RoundClosed
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import run_sim
from thinwire.store import Store

ROOT = Path(__file__).parents[1]
TASKS = {"noop": f"noop={ROOT / 'benchmarks/noop_task.py'}", "mlp": f"mlp={ROOT / 'examples/digits/task.py'}"}


def plan_of(work: str, selected: int, rounds: int) -> RunPlan:
    """50 steps of SGD, or none; nobody measures, and all is sent as it is."""
    return RunPlan.from_json({
        "run": {"task": work, "rounds": rounds, "evaluate": "off"},
        "cohort": {"clients": selected, "deadline_s": 3600.0},
        "local": {"lr": 0.5, "steps": 50, "batch": 32},
        "uplink": {"codec": "identity", "feedback": "none"},
    })  # fmt: skip


def rounds(work: str, clients: int, selected: int, count: int, processes: int) -> dict[str, list[float]]:
    moments = [(time.perf_counter(), time.process_time())]

    def on_event(event: Event) -> None:
        if isinstance(event, RoundClosed):
            if event.reason != "all" or len(event.aggregated) != selected:
                raise RuntimeError(
                    f"round {event.round} closed with {len(event.aggregated)} of {selected}: {event.reason}"
                )
            moments.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        home = AggregatorHome.under(Path(folder), durable=False)
        with Store.open(home.database, durable=False) as store:
            run_sim(
                plan_of(work, selected, count), load_task(TASKS[work]), store=store, home=home, clients=clients,
                client=ClientInfo(), on_event=on_event, processes=processes,
            )  # fmt: skip
    took = [(after - before for before, after in itertools.pairwise(each)) for each in zip(*moments, strict=True)]
    return {name: list(each) for name, each in zip(("seconds", "cpu_s"), took, strict=True)}


if __name__ == "__main__":
    print(json.dumps(rounds(sys.argv[1], *(int(given) for given in sys.argv[2:6]))))
