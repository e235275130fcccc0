"""How long the whole protocol will take, said before it begins."""

from __future__ import annotations

from benchmarks.accuracy_bytes.models import BASELINES, Model
from benchmarks.accuracy_bytes.protocol import COHORTS, PARTICIPATIONS, SPLITS, Protocol
from benchmarks.accuracy_bytes.rounds import MOST
from benchmarks.accuracy_bytes.selection import FINALISTS, STAY
from benchmarks.accuracy_bytes.trials import CLIENTS, PARTICIPATION
from thinwire.reports.sweep_results import TrialStore


def rounds_planned(model: Model, rounds: int) -> int:
    """Rounds of all cells, where R is `rounds`; one of all clients counts as so many of a fifth."""
    seeds, chains = model.seeds, len(model.candidates)
    of_fp32 = sum(horizon for horizon in model.horizons if horizon <= 2 * rounds) or model.horizons[0]
    looks = len(model.rates) * seeds.rounds * of_fp32
    tuning = len(model.rates) * seeds.rates * (chains + len(BASELINES)) * max(1, round(rounds * model.tuned_after))
    on_a = (1 + chains) * seeds.early * rounds + (1 + len(BASELINES) + STAY) * seeds.a * rounds
    on_b = (2 + len(BASELINES)) * seeds.b * rounds
    down = len(model.ways_down) * seeds.early * rounds
    weight = len(SPLITS) + sum(share / PARTICIPATION for share in PARTICIPATIONS)
    cohorts = sum(cohort / (CLIENTS * PARTICIPATION) for cohort in COHORTS)
    sweeps = round((1 + FINALISTS) * rounds * (seeds.sweep * weight + seeds.cohorts * cohorts)) if model.factors else 0
    return looks + tuning + on_a + on_b + down + sweeps


def hours(protocol: Protocol) -> float | None:
    """Return the hours of the whole protocol on a free machine, from its finished runs; None before the first one.

    While R is not known yet, it is a third of the maximum, or what a smoke run looks at.
    """
    model, lab = protocol.model, protocol.lab
    known = protocol.decisions.all().get("rounds")
    rounds = known["decided"]["rounds"] if known else min(MOST // 3, model.horizons[-1] * 4 // 5)
    done = [cell for cell in TrialStore(lab.folder / model.name).all().values() if cell.rounds]
    if not done:
        return None
    each = sum(cell.took_s for cell in done) / sum(len(cell.rounds) for cell in done)
    return rounds_planned(model, rounds) * each / lab.workers / 3600
