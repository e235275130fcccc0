"""Metrics under masks: sums of scalars are pooled metrics, and a client counts at most `weight_max` examples."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.client.train.evaluate import histogram
from thinwire.core import RunPlan
from thinwire.core.plan_values import SecureSection
from thinwire.core.score_histogram import Histograms, values
from thinwire.privacy.summed_metrics import client_scalars, impossible, scalar_names, summed_metrics, unsummed

SECURE = SecureSection(metrics={"loss": 10.0, "train/loss": 10.0}, histograms=("sick",), weight_max=100)


def drawn(client: int, examples: int) -> Histograms:
    rng = np.random.default_rng(client)
    labels = rng.random(examples) < 0.3
    return {"sick": histogram(np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1), labels).to_json()}


def total(*clients: dict[str, int]) -> dict[str, int]:
    return {name: sum(one[name] for one in clients) for name in scalar_names(SECURE)}


def test_the_sums_are_the_pooled_metrics_of_training_and_evaluation() -> None:
    said = [{"eval/loss": (2.0, 4.0), "train/loss": (9.0, 3.0)}, {"eval/loss": (8.0, 2.0), "other": (1.0, 1.0)}]
    histograms = [drawn(client, 60 + 20 * client) for client in range(2)]
    sums = total(*(client_scalars(SECURE, one, found) for one, found in zip(said, histograms, strict=True)))
    assert impossible(SECURE, sums, 2) == ""
    found = {name: (total / count, count) for name, (total, count) in summed_metrics(SECURE, sums).items()}
    pooled = values("sick", np.sum([one["sick"] for one in histograms], axis=0).tolist())
    assert found.pop("eval/loss") == pytest.approx((10 / 6, 6.0))
    assert found.pop("train/loss") == pytest.approx((3.0, 3.0))
    assert {name.removeprefix("eval/"): mean for name, (mean, _) in found.items()} == pytest.approx(pooled)
    assert {count for _, count in found.values()} == {140.0}


def test_a_client_with_a_large_test_set_counts_by_its_shares() -> None:
    large, small = drawn(1, 100_000), drawn(2, 50)
    sums = total(*(client_scalars(SECURE, {}, found) for found in (large, small)))
    mean, count = summed_metrics(SECURE, sums)["eval/sick_auc"]
    shares = np.array(large["sick"]) * (100 / 100_000) + np.array(small["sick"])
    assert count == pytest.approx(150, abs=0.01)
    assert mean / count == pytest.approx(values("sick", shares.tolist())["sick_auc"], abs=1e-3)


def test_what_no_client_has_is_no_metric() -> None:
    nothing = client_scalars(SECURE, {"eval/loss": (float("nan"), 3.0)}, {})
    assert set(nothing.values()) == {0}
    assert summed_metrics(SECURE, total(nothing, nothing)) == {}


@pytest.mark.parametrize("lie", [{"sick/0/7": -1}, {"sick/1/9": 201 << 24}, {"loss/count": 201}, {"loss": 9 << 40}])
def test_a_sum_that_no_clients_have_is_found(lie: dict[str, int]) -> None:
    honest = client_scalars(SECURE, {}, drawn(1, 60))
    assert impossible(SECURE, total(honest, honest), 2) == ""
    assert "not of 2 clients" in impossible(SECURE, {**total(honest, honest), **lie}, 2)


def test_a_histogram_of_other_bins_is_not_summed_and_a_private_run_sums_none() -> None:
    plan = {"run": {"task": "t"}, "local": {"lr": 1}, "secure": {"enabled": True, "histograms": ["sick"]}}
    coarse: Histograms = {"sick": histogram([0.1, 0.9], [0, 1], bins=2).to_json()}
    secure = RunPlan.from_json(plan)
    assert (unsummed(secure, drawn(1, 9)), unsummed(secure, {"other": coarse["sick"]})) == ("", "")
    assert "'sick' has no 512 bins" in unsummed(secure, coarse)
    private = {"mode": "local", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
    assert "a private run" in unsummed(RunPlan.from_json({**plan, "privacy": private}), drawn(1, 9))
