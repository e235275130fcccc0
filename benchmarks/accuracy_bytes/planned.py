"""How long the whole protocol will take, said before it begins."""

from __future__ import annotations

from benchmarks.accuracy_bytes.models import BASELINES, Model
from benchmarks.accuracy_bytes.protocol import DOWN, PARTICIPATIONS, SPLITS
from benchmarks.accuracy_bytes.rounds import MOST
from benchmarks.accuracy_bytes.selection import FINALISTS, STAY
from benchmarks.accuracy_bytes.trials import FP32, PARTICIPATION, Trial
from thinwire.client.task import load_task
from thinwire.simulation.sweep import trial_s


def rounds_planned(model: Model, rounds: int) -> int:
    """Rounds of all cells, where R is `rounds`; one of all clients counts as so many of a fifth."""
    seeds, chains = model.seeds, len(model.candidates)
    of_fp32 = sum(horizon for horizon in model.horizons if horizon <= 2 * rounds) or model.horizons[0]
    looks = len(model.rates) * seeds.rounds * of_fp32
    tuning = len(model.rates) * seeds.rates * (chains + len(BASELINES)) * max(1, round(rounds * model.tuned_after))
    on_a = (1 + chains) * seeds.early * rounds + (1 + len(BASELINES) + STAY) * seeds.a * rounds
    on_b = (2 + len(BASELINES)) * seeds.b * rounds
    down = len(DOWN) * seeds.a * rounds
    weight = len(SPLITS) + sum(share / PARTICIPATION for share in PARTICIPATIONS)
    sweeps = round((1 + FINALISTS) * seeds.sweep * rounds * weight) if model.factors else 0
    return looks + tuning + on_a + on_b + down + sweeps


def hours(model: Model, workers: int, rounds: int | None = None) -> float:
    """Of this machine with nothing beside it; where R is not known yet it is taken to be a third of the most."""
    one = Trial(model.work, FP32, model.rates[0], 4).made(1, load_task(model.work.task).source_digest)
    _, each = trial_s(model.work.task, one)
    return rounds_planned(model, rounds or MOST // 3) * each / workers / 3600
