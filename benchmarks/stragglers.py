"""Seconds to one accuracy where devices are unequal: waiting for all, against what a plan can do instead.

    python -m benchmarks.stragglers [--preset small|full] --json

Ten clients share the digits by dirichlet(0.3) and train the MLP on a virtual clock. A step, an encoding and an exchange
are measured on this machine first; a client takes a multiple of each that is drawn log-normally (sigma 0.5), one takes
ten times as long as the median one, and one dies in the middle of its third training, which is known 60 s later. All
times are stretched by one factor, so that a round of the median client takes 10 s. The target is 0.98 of the accuracy
that waiting for all ends with. Accuracy is of all clients' test splits, at equal aggregated updates. Late answers count
in full (`staleness_exponent = 0`), and in a second setting as a plan has it by default.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks import real_stragglers
from benchmarks.costs import Costs, add_option, measured
from benchmarks.curve import Curve, Devices, curve
from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from thinwire.client.task import load_task
from thinwire.core import Key, RunPlan, VirtualClock
from thinwire.core.events import ClientSelected, Event, RoundClosed, UpdateAccepted
from thinwire.core.prng import derive
from thinwire.core.types import Assignment
from thinwire.simulation import Behavior, LogNormal, ScriptedDevice, Training

TASK = f"digits={Path(__file__).parents[1] / 'examples/digits/task.py'}"
PARAMETERS = 9610
CLIENTS, SPLIT = 10, "dirichlet(0.3)"
SLOW, DEAD = 0, 1  # which clients
SLOWER = 10.0
SIGMA, JITTER = 0.5, 0.1  # of the clients' speeds, and of one client's from assignment to assignment
ROUND_S, DEADLINE_S, GRACE_S = 10.0, 25.0, 60.0
DIES_IN = 3  # which of its trainings, of those that it can begin
SHARE = 0.98
STEPS, LR = 20, 0.1

WAITING = "waiting"
POLICIES = (WAITING, "deadline", "partial", "buffered")
CROWDED = "all at work"  # buffered without a limit: measured beside the policies, and in no figure that stands for all
BUFFER, AT_WORK = 0.5, 0.6  # of the clients: how many updates a buffer has, how many train at once while it is open
LONG_S = 36_000  # a deadline that ends nothing
FULL, DISCOUNTED = 0.0, 0.5  # staleness_exponent: late answers that count in full, and a plan's default
SETTINGS = ((False, FULL), (True, FULL), (True, DISCOUNTED))  # (whether a client dies, the exponent)
MORE_ROUNDS = {WAITING: 1.0, "deadline": 1.25, "partial": 1.25, "buffered": 2.0, CROWDED: 2.0}  # for as many updates


@dataclass(frozen=True)
class Preset:
    seeds: int
    rounds: int  # of waiting for all
    real_rounds: int  # with processes; 0: not made
    real_step_s: float = 0.1


PRESETS = {"tiny": Preset(1, 1, 0), "small": Preset(3, 20, 0), "full": Preset(10, 20, 10)}


def plan_of(
    policy: str, rounds: int, seed: int, exponent: float = FULL, clients: int = CLIENTS, deadline_s: float = DEADLINE_S
) -> RunPlan:
    """Return the plan of a policy. Policies differ only in how a round ends and, of a buffer, how many are at work."""
    crowded = {"mode": "buffered", "buffer": int(clients * BUFFER), "deadline_s": LONG_S}
    cohort: dict[str, dict[str, Any]] = {
        WAITING: {"deadline_s": LONG_S}, "deadline": {"deadline_s": deadline_s}, "partial": {"deadline_s": deadline_s},
        "buffered": {**crowded, "max_concurrency": math.ceil(clients * AT_WORK)}, CROWDED: crowded,
    }  # fmt: skip
    return RunPlan.from_json({
        "run": {
            "task": "digits", "rounds": math.ceil(rounds * MORE_ROUNDS[policy]), "seed": seed, "evaluate": "off",
            "keep": "all",
        },
        "cohort": {
            "wait_for": clients, "max_staleness": 50, "staleness_exponent": exponent, "max_weight": "none",
            **cohort[policy],
        },
        "local": {"lr": LR, "steps": STEPS, "partial": policy == "partial"},
        "uplink": {"codec": "int8", "feedback": "none"},
    })  # fmt: skip


def stretch(costs: Costs) -> float:
    """By how much all times are drawn out, for a round of the median client to take ROUND_S."""
    return ROUND_S / (STEPS * costs.step_s + costs.encode_s + costs.exchange_s)


def speeds(seed: int) -> list[float]:
    """Return how much longer than the median client each takes."""
    draw = Random(seed)
    drawn = [draw.lognormvariate(0.0, SIGMA) for _ in range(CLIENTS)]
    drawn[SLOW] = SLOWER
    return drawn


def devices_of(costs: Costs, seed: int, dies_at_s: float = math.inf) -> Devices:
    """Clients of these costs (the median one's, drawn out already), each at its own speed; one may die."""

    def device(training: Training, index: int, speed: float) -> ScriptedDevice:
        wobble = LogNormal(costs.step_s * speed, JITTER)

        def step_s(assignment: Assignment) -> float:
            return wobble.at(derive(Key(seed), "step", assignment.assignment_id))

        one_way_s = costs.exchange_s * speed / 2
        behavior = Behavior(one_way_s, 0.0, costs.encode_s * speed, one_way_s)
        away = [(dies_at_s, math.inf)] if index == DEAD and dies_at_s < math.inf else []
        work = training.client(index, step_s)
        return ScriptedDevice(training.population.name(index), work, lambda assignment: behavior, away)

    return lambda training: [device(training, index, speed) for index, speed in enumerate(speeds(seed))]


def measure(preset: Preset, costs: Costs, workers: int) -> list[dict[str, Any]]:
    """Return one row for each policy, seed and setting; several seeds side by side, to the same figures."""
    drawn_out, rows = costs.times(stretch(costs)), list[dict[str, Any]]()
    cells = [(preset.rounds, drawn_out, seed) for seed in range(1, preset.seeds + 1)]
    if preset.seeds == 1:  # sooner here than other processes have imported torch
        return [row for cell in cells for row in told(measure_seed(*cell))]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(measure_seed, *zip(*cells, strict=True)):
            rows += told(found)
    return rows


def measure_seed(rounds: int, costs: Costs, seed: int) -> list[dict[str, Any]]:
    """All policies over the same devices, in all settings: when one dies is told by the run in which it does not."""
    task, dies_at_s, rows = load_task(TASK), dict[str, float](), list[dict[str, Any]]()
    for dying, exponent in SETTINGS:
        found = {
            policy: curve(
                plan_of(policy, rounds, seed, exponent), task, SPLIT, CLIENTS,
                devices_of(costs, seed, dies_at_s[policy] if dying else math.inf), GRACE_S,
            )
            for policy in (*POLICIES, CROWDED)
        }  # fmt: skip
        if not dying:
            dies_at_s = {policy: at_work(one.events) for policy, one in found.items()}
        rows += [{"dying": dying, "exponent": exponent, "seed": seed, **row} for row in compared(found)]
    return rows


def at_work(events: Sequence[Event]) -> float:
    """Seconds until the middle of the training in which a client is to die, in a run in which it does not."""
    mine = [e for e in events if isinstance(e, UpdateAccepted) and e.device.endswith(f"-{DEAD}")]
    answer = mine[min(DIES_IN, len(mine)) - 1]
    selected = next(e for e in events if isinstance(e, ClientSelected) and e.assignment_id == answer.assignment_id)
    return (selected.at + answer.at) / 2 - VirtualClock().origin


def measure_processes(preset: Preset, folder: Path) -> list[dict[str, Any]]:
    """Return one row for each policy: six real clients, each of which sleeps after a step."""
    deadline_s, found = DEADLINE_S / ROUND_S * STEPS * preset.real_step_s, dict[str, Curve]()
    for policy in POLICIES:
        (place := folder / policy).mkdir()
        plan = plan_of(policy, preset.real_rounds, 1, FULL, real_stragglers.CLIENTS, deadline_s)
        found[policy] = real_stragglers.run(plan, TASK, SPLIT, preset.real_step_s, place)
    return told([{"real": True, "dying": True, "exponent": FULL, "seed": 1, **row} for row in compared(found)])


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    note("; ".join(f"{row['policy']} {row['seconds'] or math.nan:.0f} s {row['accuracy']:.3f}" for row in rows))
    return rows


def compared(found: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Each policy's seconds to the target, and its accuracy after as many updates as waiting for all aggregated."""
    updates = min(one.updates for one in found.values())
    target = SHARE * found[WAITING].late_accuracy(found[WAITING].updates)
    return [
        {
            "policy": policy, "target": target, "seconds": one.seconds_to(target), "updates": updates,
            "accuracy": one.late_accuracy(updates), "slow_accuracy": one.late_accuracy(updates, SLOW),
            "closed": dict(Counter(event.reason for event in one.events if isinstance(event, RoundClosed))),
        }
        for policy, one in found.items()
    ]  # fmt: skip


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over seeds of how much sooner each policy is there, means of what it loses of accuracy; the worst of
    POLICIES stands for all of them.
    """
    found, policies = dict[str, float](), [policy for policy in (*POLICIES, CROWDED) if policy != WAITING]
    for name, dying, exponent in (
        ("speedup", True, FULL), ("speedup_all_alive", False, FULL), ("speedup discounted", True, DISCOUNTED),
    ):  # fmt: skip
        of = [row for row in rows if (row["dying"], row["exponent"]) == (dying, exponent)]
        each = {f"{name} {policy}": median(_ratios(of, policy)) for policy in policies}
        found |= {**each, name: min(ratio for policy, ratio in each.items() if CROWDED not in policy)}
    for name, column, exponent in (
        ("accuracy_gap", "accuracy", FULL), ("slow_client_gap", "slow_accuracy", FULL),
        ("accuracy_gap discounted", "accuracy", DISCOUNTED),
        ("slow_client_gap discounted", "slow_accuracy", DISCOUNTED),
    ):  # fmt: skip
        of = [row for row in rows if row["exponent"] == exponent]
        mean = {policy: fmean(row[column] for row in of if row["policy"] == policy) for policy in (WAITING, *policies)}
        each = {f"{name} {policy}": mean[WAITING] - mean[policy] for policy in policies}
        found |= {**each, name: max(gap for policy, gap in each.items() if CROWDED not in policy)}
    return found


def _ratios(rows: Sequence[Mapping[str, Any]], policy: str) -> list[float]:
    """Return the ratio of each seed; 0 where the run ended before the target was reached."""
    seconds = {(row["policy"], row["seed"]): row["seconds"] for row in rows}
    seeds = sorted({seed for _, seed in seconds})
    return [seconds[WAITING, seed] / (seconds[policy, seed] or math.inf) for seed in seeds]


def real_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how much sooner each policy is there with processes; nothing where none ran."""
    policies = [row["policy"] for row in rows if row["policy"] != WAITING]
    return {f"real_speedup {policy}": _ratios(rows, policy)[0] for policy in policies}


def main() -> None:
    parser = arguments("stragglers", __doc__, PRESETS)
    add_option(parser)
    given = parser.parse_args()
    end_what_we_started()
    costs = Costs.of(given.costs) if given.costs else measured(TASK, plan_of(WAITING, 1, 1), PARAMETERS)
    note(f"{costs}; drawn out {stretch(costs):.0f} times")
    preset, real = PRESETS[given.preset], list[dict[str, Any]]()
    rows = measure(preset, costs, len(os.sched_getaffinity(0)))
    if preset.real_rounds:
        with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
            real = measure_processes(preset, Path(folder))
    found = {**figures(rows), **real_figures(real), **costs.figures(), "stretch": stretch(costs)}
    show(document("stragglers", given.preset, [*rows, *real], found), given.json)


if __name__ == "__main__":
    main()
