"""Metrics under masks: sums of scalars are pooled metrics, and a client counts at most `weight_max` examples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from thinwire.client.train.evaluate import histogram
from thinwire.core import RunPlan
from thinwire.core.plan_values import SecureSection
from thinwire.core.score_histogram import Histograms, values
from thinwire.privacy.secret_rng import SystemRng
from thinwire.privacy.summed_metrics import client_scalars, impossible, scalar_names, summed_metrics, unsummed

SECURE = SecureSection(metrics={"loss": 10.0, "train/loss": 10.0}, histograms=("sick",), weight_max=100)
RNG = SystemRng()


def drawn(client: int, examples: int) -> Histograms:
    rng = np.random.default_rng(client)
    labels = rng.random(examples) < 0.3
    return {"sick": histogram(np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1), labels).to_json()}


def total(*clients: dict[str, int]) -> dict[str, int]:
    return {name: sum(one[name] for one in clients) for name in scalar_names(SECURE)}


def test_the_sums_are_the_pooled_metrics_of_training_and_evaluation() -> None:
    said = [{"eval/loss": (2.0, 4.0), "train/loss": (9.0, 3.0)}, {"eval/loss": (8.0, 2.0), "other": (1.0, 1.0)}]
    histograms = [drawn(client, 60 + 20 * client) for client in range(2)]
    sums = total(*(client_scalars(SECURE, one, found, RNG) for one, found in zip(said, histograms, strict=True)))
    assert impossible(SECURE, sums, 2) == ""
    found = {name: (total / count, count) for name, (total, count) in summed_metrics(SECURE, sums).items()}
    pooled = values("sick", np.sum([one["sick"] for one in histograms], axis=0).tolist())
    assert found.pop("eval/loss") == pytest.approx((10 / 6, 6.0), abs=0.01)
    assert found.pop("train/loss") == pytest.approx((3.0, 3.0), abs=0.01)
    assert {name.removeprefix("eval/"): mean for name, (mean, _) in found.items()} == pytest.approx(pooled)
    assert {count for _, count in found.values()} == {140.0}


def test_a_client_with_a_large_test_set_counts_as_many_examples_as_weight_max_and_all_are_whole() -> None:
    """A scale of its own would show in the low digits of each sum how many examples a client has, and which."""
    large, small = drawn(1, 100_000), drawn(2, 50)
    scalars = [client_scalars(SECURE, {}, found, RNG) for found in (large, small)]
    assert [sum(one[name] for name in scalar_names(SECURE) if "sick" in name) for one in scalars] == [100, 50]
    assert all(scalars[0][f"sick/{label}/{at}"] <= large["sick"][label][at] for label in (0, 1) for at in range(512))
    mean, count = summed_metrics(SECURE, total(*scalars))["eval/sick_auc"]
    assert count == 150
    assert mean / count == pytest.approx(values("sick", large["sick"])["sick_auc"], abs=0.2)


def test_a_mean_is_rounded_at_random_to_a_grid_of_its_bound() -> None:
    third = {"eval/loss": (10.0, 3.0)}  # 1/3 of the bound is 341.33 units an example
    one = SecureSection(metrics={"loss": 10.0}, weight_max=1)
    found = Counter(client_scalars(one, third, {}, RNG)["loss"] for _ in range(4000))
    assert set(found) == {341, 342}
    assert found[342] / 4000 == pytest.approx(1 / 3, abs=0.04)  # five standard deviations


def test_what_no_client_has_is_no_metric() -> None:
    nothing = client_scalars(SECURE, {"eval/loss": (float("nan"), 3.0)}, {}, RNG)
    assert set(nothing.values()) == {0}
    assert summed_metrics(SECURE, total(nothing, nothing)) == {}


@pytest.mark.parametrize("lie", [{"sick/0/7": -1}, {"sick/1/9": 201}, {"loss/count": 201}, {"loss": 9 << 40}])
def test_a_sum_that_no_clients_have_is_found(lie: dict[str, int]) -> None:
    honest = client_scalars(SECURE, {}, drawn(1, 60), RNG)
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
