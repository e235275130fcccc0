"""Accuracy against epsilon: central and distributed privacy, and Flower's central mechanism on the same work.

    python -m benchmarks.privacy_utility [--preset tiny|small|full|code_lm] --json

200 clients with 24 examples each (`benchmarks.many_clients`) train the network of `examples/digits`, all of them in
each round: without amplification by sampling, more clients a round cost no epsilon. Each client is charged for all
rounds (`max_participations`). Delta is 1e-4. The number of rounds and the clip were chosen for each epsilon on seeds
101 to 103, with central noise; the seeds here are from 1 on. A seed decides the examples and the first model. The
noise comes from the system's entropy, so each seed has several draws, and figures differ from run to run. The preset
`code_lm` trains the language model of `benchmarks.many_files`; its rounds and clip were chosen on seeds 101 and 102.

The code of the sums is that of the product, with the noise that `noise_plan` finds for the claim:

- `central` is `PrivateSum`, without a codec before it;
- `distributed` is `PrivateLattice` at the width that the plan finds, with `max_corrupt = max_dropout = 0.1`. Its cost
  counts on the noise of 160 of the 200 clients. All 200 remain here, which is the most noise. Masks are left out: they
  leave no trace in a sum. `distributed 0.25` has `[secure] support = 0.25` besides, and so a quarter of the bytes. Its
  clip is half as long, as is a quarter of an update, and its `[server] lr` is 4, as a value is sent each fourth round;
- `amplified` is `central` with `[privacy] sampling_rate` = 0.25: Poisson samples of 50 clients on average, by the coins
  of the product, and a sum that is divided by 50. Each client is charged for each round, sampled or not. The number of
  rounds was chosen on the same three seeds, of one, two and four times those of the other arms;
- `flower` is `DifferentialPrivacyServerSideFixedClipping` of the installed Flower around its `FedAvg`. It is called
  without its engine, with the noise multiplier of a Gaussian at the same claim by our accountant;
- `none` has neither clip nor noise, with the rounds of the largest epsilon.

`distributed_gap EPSILON` is the accuracy of `central` minus that of `distributed`, mean over the seeds, and
`distributed_gap_error EPSILON` the standard error of that mean; `distributed_gap` is the largest of them (goal: at most
0.01). `peer_gap` is likewise `flower` minus `central`: at most 0 if ours is as good. `support_gap` is `distributed`
minus `distributed 0.25`, and `amplification_gain` is `amplified` minus `central`. On two cores the small preset takes a
minute, and the others a quarter of an hour.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from numpy.typing import NDArray

from benchmarks import many_clients, many_files
from benchmarks.document import note
from benchmarks.entry import run_in_folder
from benchmarks.many_clients import CLIENTS
from thinwire.aggregation.plan_codecs import lattice_of
from thinwire.aggregation.private_lattice import PrivateSum
from thinwire.aggregation.server_optimizers import apply_optimizer
from thinwire.core import Key, RunPlan
from thinwire.core.types import SecureWork, State, Vector
from thinwire.privacy.accounting import Release, noise_for
from thinwire.privacy.noise_plan import NoisePlan, noise_plan
from thinwire.privacy.secret_rng import SystemRng
from thinwire.server.policy.cohort import poisson_sample

DELTA = 1e-4
NONE, CENTRAL, DISTRIBUTED, SPARSE, FLOWER = "none", "central", "distributed", "distributed 0.25", "flower"
AMPLIFIED, SAMPLING_RATE = "amplified", 0.25
GAPS = {
    "distributed_gap": (CENTRAL, DISTRIBUTED), "peer_gap": (FLOWER, CENTRAL), "support_gap": (DISTRIBUTED, SPARSE),
    "amplification_gain": (AMPLIFIED, CENTRAL),
}  # fmt: skip
SUPPORT = {DISTRIBUTED: 1.0, SPARSE: 0.25}

Round = Callable[[Vector, NDArray[np.float32], int], Vector]  # (model, updates, round from 0) -> the next model


@dataclass(frozen=True)
class Task:
    """Holds what the clients learn: model and data by a seed, and the settings of their plan.

    `size` is that of the model. `work` maps an epsilon to the rounds and the clip of its runs, and to the rounds of
    those with samples.
    """

    name: str
    size: int
    steps: int
    rate: float
    work: Mapping[float, tuple[int, float, int]]
    data: Callable[..., Any]  # (seed, clients)
    first_model: Callable[[int], Vector]
    updates: Callable[[Vector, Any, int, float], NDArray[np.float32]]
    accuracy: Callable[[Vector, Any], float]


DIGITS = Task(
    "digits", many_clients.SIZE, 10, 0.3, {2.0: (16, 0.6, 32), 4.0: (16, 0.8, 64), 8.0: (24, 0.8, 96)},
    many_clients.digits_of, many_clients.first_model, many_clients.updates_of, many_clients.accuracy,
)  # fmt: skip
CODE_LM = Task(
    "code_lm", many_files.SIZE, 5, 2.0, {4.0: (24, 2.0, 48), 8.0: (24, 2.0, 48)},
    many_files.code_of, many_files.first_model, many_files.updates_of, many_files.accuracy,
)  # fmt: skip
TASKS = {task.name: task for task in (DIGITS, CODE_LM)}


@dataclass(frozen=True)
class Preset:
    epsilons: tuple[float, ...]
    seeds: int
    draws: int
    clients: int = CLIENTS
    task: str = DIGITS.name


PRESETS = {
    "tiny": Preset((8.0,), 1, 1, 50),
    "small": Preset((2.0, 8.0), 2, 1),
    "full": Preset(tuple(DIGITS.work), 5, 2),
    "code_lm": Preset(tuple(CODE_LM.work), 5, 1, task=CODE_LM.name),
}


def plan_of(arm: str, epsilon: float, clients: int, task: Task = DIGITS) -> RunPlan:
    """Return the plan of one arm; that of Flower's and of no privacy is the central one."""
    (rounds, clip, more), support = task.work[epsilon], SUPPORT.get(arm, 1.0)
    distributed, sampled = arm in SUPPORT, arm == AMPLIFIED
    if sampled:
        rounds = more
    secure = {"enabled": True, "max_corrupt": 0.1, "max_dropout": 0.1, "support": support}
    return RunPlan.from_json({
        "run": {"task": task.name, "rounds": rounds, "evaluate": "off"},
        "cohort": {"wait_for" if sampled else "clients": clients, "deadline_s": 60, "late": "drop"},
        "local": {"lr": task.rate, "steps": task.steps, "buffers": "local"},
        "uplink": {} if distributed else {"codec": "identity"},
        "server": {"lr": 1 / support},
        "secure": secure if distributed else {},
        "privacy": {
            "mode": "distributed" if distributed else "central", "clip": clip * support**0.5, "target_epsilon": epsilon,
            "delta": DELTA, **({"sampling_rate": SAMPLING_RATE} if sampled else {"max_participations": rounds}),
        },
    })  # fmt: skip


def central(plan: RunPlan, clients: int, size: int) -> tuple[Round, NoisePlan]:
    """Return the round of central mode, and its noise; its sum is divided by the clients that are expected in it."""
    divisor = clients * (plan.privacy.sampling_rate or 1.0)
    rng, noise, clip = SystemRng(), noise_plan(plan, size, clients), plan.privacy.clip
    assert clip is not None, "the plan has one"
    state: State = {}

    def made(model: Vector, updates: NDArray[np.float32], number: int) -> Vector:
        nonlocal state
        del number
        total = PrivateSum(size, clip, noise.scale, divisor, rng)
        for update in updates:
            total.add(update)
        model, state = apply_optimizer(
            plan.server, model, total.release(lambda out: noise.sampler.fill(out, rng)), state
        )
        return model

    return made, noise


def distributed(plan: RunPlan, clients: int, size: int) -> tuple[Round, NoisePlan]:
    """Return the round of distributed mode, and its noise. No client leaves it."""
    rng, clip, state = SystemRng(), plan.privacy.clip, dict[str, Any]()
    assert clip is not None, "the plan has one"
    lattice = lattice_of(plan, size, SecureWork(clients, 0, clip), "utility")

    def made(model: Vector, updates: NDArray[np.float32], number: int) -> Vector:
        nonlocal state
        window, total = number % lattice.walk.windows, np.zeros(lattice.lanes, lattice.dtype)
        rotation = Key(*np.frombuffer(rng.random_bytes(16), np.uint64).tolist())
        for update in updates:
            total += lattice.encode(update, 1, window, rotation, rng).lanes
        mean = lattice.decode_sum(total, clients, clients, window, rotation)
        model, state = apply_optimizer(plan.server, model, mean, state)
        return model

    return made, noise_plan(plan, lattice.padded, clients)


def flower(plan: RunPlan, clients: int, noise_multiplier: float, seed: int) -> Round:
    """Return the round of Flower's strategy, which draws its noise from numpy's global generator."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    np.random.seed(seed)  # noqa: NPY002  # theirs
    assert plan.privacy.clip is not None, "the plan has one"
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), noise_multiplier, plan.privacy.clip, clients)

    def made(model: Vector, updates: NDArray[np.float32], number: int) -> Vector:
        strategy.current_round_params = [model]
        replies = [
            FitRes(Status(Code.OK, ""), ndarrays_to_parameters([model + update]), 1, {}) for update in updates
        ]  # fmt: skip
        found, _ = strategy.aggregate_fit(number + 1, [(None, reply) for reply in replies], [])  # type: ignore[misc]  # the proxies are not read
        assert found is not None, "no client failed"
        return np.asarray(parameters_to_ndarrays(found)[0], dtype=np.float32)

    return made


def gaussian_multiplier(plan: RunPlan, size: int) -> float:
    """Return the least noise multiplier of a Gaussian for the plan's claim."""
    epsilon, delta = plan.privacy.target_epsilon, plan.privacy.delta
    assert epsilon is not None and delta is not None, "the plan has both"  # noqa: PT018
    return noise_for(epsilon, delta, lambda z: Release("gaussian", 1.0, z * z, size), plan.run.rounds)


def measure_one(arm: str, epsilon: float, seed: int, draw: int, clients: int, task: Task, data: Any) -> dict[str, Any]:
    """Train one model, and return its accuracy and the numbers of its noise; `draw` numbers runs of one seed."""
    plan, model, noise = plan_of(arm, epsilon, clients, task), task.first_model(seed), None
    if arm == NONE:
        made: Round = lambda model, updates, number: model + updates.mean(0)  # noqa: E731
        multiplier = 0.0
    elif arm == FLOWER:
        multiplier = gaussian_multiplier(plan, task.size)
        made = flower(plan, clients, multiplier, 1000 * seed + draw)
    else:
        made, noise = (distributed if arm in SUPPORT else central)(plan, clients, task.size)
        multiplier = noise.noise_multiplier
    norms, rng = list[float](), SystemRng()
    for number in range(plan.run.rounds):
        some = data if arm != AMPLIFIED else data.of(sample(clients, rng))
        updates = task.updates(model, some, task.steps, task.rate)
        if len(updates):  # a sample may be empty
            norms.append(float(np.median(np.linalg.norm(updates, axis=1))))
        model = made(model, updates, number)
    return {
        "task": task.name, "arm": arm, "epsilon": None if arm == NONE else epsilon, "delta": DELTA, "seed": seed,
        "draw": draw, "clients": clients, "rounds": plan.run.rounds, "clip": plan.privacy.clip,
        "noise_multiplier": multiplier, "width": noise.width if noise else 0,
        "dimensions": noise.release.dimensions if noise else task.size,
        "median_norm": fmean(norms), "accuracy": task.accuracy(model, data),
    }  # fmt: skip


def sample(clients: int, rng: SystemRng) -> list[int]:
    """Return the clients of one round by the coins of the product."""
    return [int(one) for one in poisson_sample([str(client) for client in range(clients)], SAMPLING_RATE, rng)]


def measure(preset: Preset, folder: Path, workers: int = 1) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run all cells, those of a seed one after the other."""
    del folder  # all of it is in memory
    seeds = range(1, preset.seeds + 1)
    if workers == 1:
        rows = [row for seed in seeds for row in measure_seed(preset, seed)]
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            rows = [row for found in pool.map(measure_seed, repeat(preset), seeds) for row in found]
    return rows, figures(rows)


def measure_seed(preset: Preset, seed: int) -> list[dict[str, Any]]:
    """Run all cells of one seed."""
    torch.set_num_threads(1)
    largest, task = max(preset.epsilons), TASKS[preset.task]
    data = task.data(seed, preset.clients)
    rows = [measure_one(NONE, largest, seed, 1, preset.clients, task, data)]
    cells = [(arm, epsilon) for epsilon in preset.epsilons for arm in (CENTRAL, AMPLIFIED, DISTRIBUTED, FLOWER)]
    if task is DIGITS:
        cells.append((SPARSE, largest))
    for draw, (arm, epsilon) in product(range(1, preset.draws + 1), cells):
        rows.append(measure_one(arm, epsilon, seed, draw, preset.clients, task, data))
        note(f"seed {seed}, draw {draw}, epsilon {epsilon:g}, {arm}: {rows[-1]['accuracy']:.4f}")
    return rows


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each mean accuracy and gap with its standard error, and the largest gap of each kind."""
    runs, found = dict[tuple[str, float | None, int], list[float]](), dict[str, float]()
    for row in rows:
        runs.setdefault((row["arm"], row["epsilon"], row["seed"]), []).append(float(row["accuracy"]))
    of = {cell: fmean(accuracies) for cell, accuracies in runs.items()}
    seeds = sorted({row["seed"] for row in rows})

    def tell(name: str, end: str, values: Sequence[float]) -> None:
        found[f"{name} {end}"] = fmean(values)
        if len(values) > 1:
            found[f"{name}_error {end}"] = stdev(values) / len(values) ** 0.5

    for arm, epsilon in dict.fromkeys((row["arm"], row["epsilon"]) for row in rows):
        end = arm if epsilon is None else f"{arm}, {epsilon:g}"
        tell("accuracy", end, [of[arm, epsilon, seed] for seed in seeds])
    for name, (better, worse) in GAPS.items():
        if not any(arm == worse for arm, _, _ in of):
            continue
        both = [epsilon for arm, epsilon in dict.fromkeys((row["arm"], row["epsilon"]) for row in rows) if arm == worse]
        for epsilon in both:
            tell(name, f"{epsilon:g}", [of[better, epsilon, seed] - of[worse, epsilon, seed] for seed in seeds])
        found[name] = max(found[f"{name} {epsilon:g}"] for epsilon in both)
    return found


if __name__ == "__main__":
    run_in_folder("privacy_utility", __doc__, PRESETS, partial(measure, workers=len(os.sched_getaffinity(0))))
