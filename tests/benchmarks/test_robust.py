"""`benchmarks.robust` runs and prints its figures; attacks do what their names say. How robust a rule is: the page."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.robust import NAMED, PRESETS, figures
from benchmarks.robust_rounds import ATTACKS, CLIENTS, HONEST, HOSTILE, REDUCTIONS, is_hostile
from tests.support.benchmark_document import document_of
from thinwire.aggregation.reductions import reduction_of


def test_it_runs_and_the_document_has_its_shape() -> None:
    made = document_of("robust")
    names = {"worst_gap_30", "backdoor_success", "seconds_ratio_flower", "peak_models", "flower_apart"}
    assert set(made["figures"]) == names
    assert made["figures"]["flower_apart"] < 1e-5
    assert {row["what"] for row in made["rows"]} == {"accuracy", "seconds", "memory"}


def test_the_worst_gap_is_that_of_the_worst_attack_over_the_seeds() -> None:
    def row(attack: str, reduce: str, seed: int, accuracy: float) -> dict[str, object]:
        named = {"what": "accuracy", "task": "digits", "split": "iid", "attack": attack, "reduce": reduce}
        return {**named, "seed": seed, "accuracy": accuracy, "backdoor": 0.25, "flower_apart": 0.0}

    plain = [row("none", "mean", seed, 0.9) for seed in (1, 2)]
    attacked = [row("ipm", NAMED, 1, 0.8), row("ipm", NAMED, 2, 0.9), row("backdoor", NAMED, 1, 0.88)]
    others = [row("ipm", "mean", 1, 0.1), {**row("ipm", NAMED, 1, 0.1), "split": "dirichlet(1.0)"}]
    others += [{"what": "seconds", "ratio": 4.0, "flower_apart": 0.0}, {"what": "memory", "peak_models": 2.0}]
    found = figures([*plain, *attacked, *others])
    assert found["worst_gap_30"] == pytest.approx(0.05)
    assert found["backdoor_success"] == 0.25


def test_the_full_preset_is_the_protocol_and_each_rule_has_enough_clients() -> None:
    full = PRESETS["full"]
    assert ([*full.reductions], full.seeds, full.params, full.cohorts) == (["digits", "cnn"], 5, 25_000_000, (10, 100))
    assert set(full.attacks) == {*ATTACKS}
    assert all(NAMED in specs for specs in full.reductions.values())
    assert all(reduction_of(spec).fewest <= CLIENTS for spec in REDUCTIONS if spec not in ("mean", HONEST))
    assert sum(is_hostile(f"sim-{number}") for number in range(CLIENTS)) == HOSTILE == 0.3 * CLIENTS


def test_hostile_updates_replace_their_own_rows() -> None:
    rng = np.random.default_rng(1)
    honest, own = rng.normal(1, 1, (14, 50)).astype(np.float32), np.ones((6, 50), np.float32)
    made = {name: attack(honest, own, rng) for name, attack in ATTACKS.items()}
    assert all(rows.shape == own.shape for rows in made.values())
    assert np.array_equal(made["none"], own)
    assert np.allclose(made["ipm"], -honest.mean(axis=0) / 2)
    apart = (honest.mean(axis=0) - made["alie"][0]) / honest.std(axis=0)
    assert np.allclose(apart, 0.3661, atol=1e-3), "the deviations of Baruch et al. for 6 of 20"
