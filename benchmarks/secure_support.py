"""Measure what a support below 1 costs a secure run in accuracy, at equal rounds.

    python -m benchmarks.secure_support [--preset tiny|small|full] [--task digits|code_lm] --json

With `[secure] support = 0.1` a round sums a tenth of the coordinates, and what a client does not send stays in its
residual. The tasks, splits, learning rates, local steps and clients (20, of which 4 are selected in a round) are those
of the fp32 cells of `benchmarks.accuracy_bytes`, and so are the rounds of the full preset. Simulated, so all public
numbers follow from seeds. The rounding and the rotation of an update are secret, and differ from run to run.

A secure run evaluates no version after its last round, so versions are measured behind the run, on the test examples
of all clients. A row is one run: `last` is the accuracy of its last version, and `accuracy` the mean over the measured
versions of the last quarter of the rounds, because one version differs by points from the next. `clip` is the clip at
the end.

`support_gap` is the larger one of `support_gap TASK`: accuracy of the dense runs minus that of a support of 0.1, mean
over the seeds. `support_gap_error TASK` is the standard error of that mean, and `support_gap_last TASK` is the same of
the last versions. Likewise `no_residual_gap` is the gap of a support of 0.1 with `[uplink] feedback = "none"`, and
`momentum_gap` that of the same with server momentum 0.8, which moves a coordinate between two of its windows too.
`adam_gap` is that of the same with FedAdam, whose learning rate and momentum were chosen on other seeds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.trials import CLIENTS, NEVER_S, PARTICIPATION
from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from thinwire.client import ClientInfo
from thinwire.client.task import initial_model, load_task
from thinwire.client.train.evaluate import evaluate
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored
from thinwire.core.run_events import SumUnmasked
from thinwire.core.statedir import AggregatorHome
from thinwire.server.model_store import Versions
from thinwire.simulation import Training
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.simulation.run import run_sim
from thinwire.store import Store

DENSE, SPARSE, ALONE, MOMENTUM, ADAM = "dense", "support", "no_residual", "momentum", "adam"
SUPPORT = 0.1
ARMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    DENSE: {},
    SPARSE: {"secure": {"support": SUPPORT}},
    ALONE: {"secure": {"support": SUPPORT}, "uplink": {"feedback": "none"}},
    MOMENTUM: {
        "secure": {"support": SUPPORT},
        "uplink": {"feedback": "none"},
        "server": {"optimizer": "fedavgm", "momentum": 0.8},
    },
    ADAM: {
        "secure": {"support": SUPPORT},
        "uplink": {"feedback": "none"},
        "server": {"optimizer": "fedadam", "lr": 0.03, "momentum": 0.8},
    },
}
RATES = {"digits": 0.8, "code_lm": 2.0}  # of the fp32 cells
EVERY = {"digits": 1, "code_lm": 5}  # of the versions of the last quarter, each so-manieth is measured
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Preset:
    """Sets how many rounds each task has, and how many seeds."""

    rounds: Mapping[str, int]
    seeds: int


PRESETS = {
    "tiny": Preset({"digits": 10}, 1),
    "small": Preset({"digits": 80}, 8),
    "full": Preset({"digits": 80, "code_lm": 240}, 3),
}


def plan_of(task: str, arm: str, rounds: int, seed: int) -> RunPlan:
    """Return the plan of one run. Nobody evaluates in it, and all versions are kept."""
    work, more = FULL[task].work, ARMS[arm]
    raw: dict[str, dict[str, Any]] = {
        "run": {"task": task, "rounds": rounds, "seed": seed, "keep": "all", "evaluate": "off"},
        "cohort": {"clients": PARTICIPATION, "deadline_s": NEVER_S, "late": "drop"},
        "local": {
            "lr": RATES[task], "steps": work.steps, "batch": work.batch, "clip_grad": work.clip, "buffers": "local",
        },
        "secure": {"enabled": True},
        "uplink": {}, "server": {},
    }  # fmt: skip
    return RunPlan.from_json({name: {**table, **more.get(name, {})} for name, table in raw.items()})


def measure(preset: Preset, tasks: Sequence[str], workers: int) -> Rows:
    """Make all runs, of a seed the arms one after the other."""
    cells = [
        (task, arm, preset.rounds[task], seed)
        for task, seed, arm in product(tasks, range(1, preset.seeds + 1), ARMS)
        if task in preset.rounds
    ]
    rows = Rows()
    with contextlib.ExitStack() as opened:
        each: Callable[..., Iterator[dict[str, Any]]] = map
        if preset.seeds > 1:  # one seed is sooner here than other processes have imported torch
            each = opened.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))).map
        for row in each(measure_one, *zip(*cells, strict=True)):
            note(f"{row['task']}, seed {row['seed']}, {row['arm']}: {row['accuracy']:.4f}, last {row['last']:.4f}")
            rows.append(row)
    return rows


def measure_one(name: str, arm: str, rounds: int, seed: int) -> dict[str, Any]:
    """Run one plan, and measure the versions of its last quarter."""
    work, plan = FULL[name].work, plan_of(name, arm, rounds, seed)
    task, client = load_task(work.task), ClientInfo(split=work.split, seed=seed)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        home = AggregatorHome.under(Path(folder), durable=False)
        with Store.open(home.database, durable=False) as store:
            run_id = run_sim(plan, task, store=store, home=home, clients=CLIENTS, client=client)
            row, events = store.run(run_id), [event for _, event in store.events(run_id)]
        stored = {event.version: event for event in events if isinstance(event, ModelStored)}
        if row.status != "done" or max(stored) != rounds:
            raise RuntimeError(f"a run of {name} is {row.status} with {max(stored)} steps: {row.status_text}")
        versions = Versions(home.run(run_id), initial_model(task, seed).layout, durable=False)
        training = Training(task, ClientPopulation(Path(folder) / "clients", client, CLIENTS))
        late = [version for version in range(rounds - rounds // 4 + 1, rounds + 1) if version % EVERY[name] == 0]
        found = {version: _accuracy(versions, stored[version], training) for version in {*late, rounds}}
    sums = [event for event in events if isinstance(event, SumUnmasked)]
    return {
        "task": name, "arm": arm, "seed": seed, "rounds": rounds, "last": found[rounds],
        "accuracy": fmean(found[version] for version in late), "payload_up": row.payload_up, "clip": sums[-1].next_clip,
    }  # fmt: skip


def _accuracy(versions: Versions, stored: ModelStored, training: Training) -> float:
    """Return the accuracy of one version. Every client of these tasks has the test examples of all clients."""
    executor = training.executor.inner
    module = executor.set_up(*versions.read(stored), stored.counters)
    test = executor.split(training.population.client_info(0)).test
    correct, examples = evaluate(module, executor.task, test)["accuracy"]
    return correct / examples


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the gaps of each task, and the largest one of each arm."""
    of, found = {(row["task"], row["arm"], row["seed"]): row for row in rows}, dict[str, float]()
    seeds, tasks = sorted({row["seed"] for row in rows}), dict.fromkeys(row["task"] for row in rows)
    for arm in (SPARSE, ALONE, MOMENTUM, ADAM):
        for task in tasks:
            each = [(of[task, DENSE, seed], of[task, arm, seed]) for seed in seeds]
            gaps = [dense["accuracy"] - sparse["accuracy"] for dense, sparse in each]
            found[f"{arm}_gap {task}"] = fmean(gaps)
            found[f"{arm}_gap_last {task}"] = fmean(dense["last"] - sparse["last"] for dense, sparse in each)
            if len(gaps) > 1:
                found[f"{arm}_gap_error {task}"] = stdev(gaps) / len(gaps) ** 0.5
        found[f"{arm}_gap"] = max(found[f"{arm}_gap {task}"] for task in tasks)
    return found


def main() -> None:
    """Measure the tasks that are requested, and print the document."""
    parser = arguments("secure_support", __doc__, PRESETS)
    parser.add_argument("--task", action="append", choices=list(RATES), help="this task only; repeatable")
    given = parser.parse_args()
    end_what_we_started()
    rows = measure(PRESETS[given.preset], given.task or list(RATES), len(os.sched_getaffinity(0)))
    show(document("secure_support", given.preset, rows, figures(rows)), given.json)


if __name__ == "__main__":
    main()
