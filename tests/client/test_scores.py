"""Histograms of scores: their AUC and F1 are those of the scores, and what is no histogram never leaves the task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score

from tests.support.small_task import linear, task_of
from thinwire.client import histogram
from thinwire.client.train.errors import BadTask
from thinwire.client.train.evaluate import BINS, MAX_HISTOGRAMS, numbers, whole_set
from thinwire.core import score_histogram
from thinwire.core.score_histogram import auc, checked, f1, own_values


def drawn(seed: int, kind: str) -> tuple[Any, Any]:
    """Scores of 3 000 examples as classifiers give them, with their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.random(3000) < 0.2
    logits = {
        "usual": rng.normal(1.2 * labels - 0.6, 1.0),
        "sure": rng.normal(14.0 * labels - 7.0, 6.0),
        "untrained": rng.normal(0.02 * labels - 0.01, 0.02),
        "rare": rng.normal(1.5 * labels - 5.0, 1.0),
    }[kind]
    return 1 / (1 + np.exp(-logits)), labels


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 999), kind=st.sampled_from(["usual", "sure", "untrained", "rare"]))
def test_auc_is_within_two_thousandths_of_scikit_learns_and_f1_is_equal(seed: int, kind: str) -> None:
    scores, labels = drawn(seed, kind)
    parts = [histogram(scores[part::7], labels[part::7]) for part in range(7)]
    negatives = np.sum([part.negatives for part in parts], axis=0).tolist()
    positives = np.sum([part.positives for part in parts], axis=0).tolist()
    assert auc(negatives, positives) == pytest.approx(roc_auc_score(labels, scores), abs=0.002)
    assert f1(negatives, positives) == pytest.approx(f1_score(labels, scores >= 0.5))


def test_it_takes_tensors_arrays_and_lists_alike() -> None:
    scores, labels = [0.0, 0.5, 0.4999, 1.0], [0, 1, 0, 1]
    made = histogram(scores, labels)
    assert made == histogram(np.array(scores), np.array(labels, bool))
    assert made == histogram(torch.tensor(scores, requires_grad=True), torch.tensor(labels))
    assert (sum(made.positives[: BINS // 2]), sum(made.positives[BINS // 2 :])) == (0, 2)
    assert made.positives[BINS - 1] == made.negatives[0] == 1


@pytest.mark.parametrize(
    ("scores", "labels", "bins", "what"),
    [
        ([0.5], [0, 1], 4, "1 scores and 2 labels"),
        ([1.5], [1], 4, "not all from 0 to 1"),
        ([float("inf")], [1], 4, "not all from 0 to 1"),
        ([0.5], [2], 4, "other than 0 and 1"),
        ([0.5], [1], 3, "bins = 3"),
        ([0.5], [1], 1024, "bins = 1024"),
    ],
)
def test_what_is_no_score_or_label_is_refused(scores: Any, labels: Any, bins: int, what: str) -> None:
    with pytest.raises(BadTask, match=what):
        histogram(scores, labels, bins)


def test_a_score_of_a_model_that_diverged_counts_as_0() -> None:
    """A failure would tell the aggregator, which may send such a model, whose data drove it there."""
    assert histogram([float("nan"), 0.9], [1, 0], 4) == histogram([0.0, 0.9], [1, 0], 4)


def evaluated(said: Any) -> Any:
    found, histograms = whole_set(linear(), task_of(evaluate=lambda model, data: said), None, {"loss": (3.0, 6.0)})
    return numbers(found), histograms


def test_a_number_counts_as_much_as_the_loss_and_a_pair_as_it_says() -> None:
    made = histogram([0.1, 0.9], [0, 1], bins=2)
    sums, histograms = evaluated({"kappa": 0.5, "hits": (3, 4), "sick": made})
    assert sums == {"kappa": (3.0, 6.0), "hits": (3.0, 4.0)}
    assert histograms == {"sick": [[1, 0], [0, 1]]}
    assert own_values(histograms) == {"sick_auc": (2.0, 2.0), "sick_f1": (2.0, 2.0)}
    assert whole_set(linear(), task_of(), None, {}) == ({}, {})


def test_evaluate_gets_the_test_data_and_a_model_in_evaluation_mode() -> None:
    seen = list[Any]()

    def evaluate(model: Any, data: Any) -> Any:
        seen.append((model.training, torch.is_grad_enabled(), data))
        return {}

    model = linear()
    whole_set(model, task_of(evaluate=evaluate), "test", {})
    assert seen == [(False, False, "test")]
    assert model.training


@pytest.mark.parametrize(
    "said",
    [
        None, 3.0, {"a": "text"}, {"a": (1, 2, 3)}, {"a": (1, -2)}, {"n" * 65: 1.0}, {"accuracy": 1.5},
        {str(n): histogram([0.5], [1]) for n in range(MAX_HISTOGRAMS + 1)},
        {"n" * 61: histogram([0.5], [1])}, {str(n): 1.0 for n in range(65)},
    ],
)  # fmt: skip
def test_anything_else_is_a_fault_of_the_task(said: Any) -> None:
    with pytest.raises(BadTask, match=r"evaluate\(model, data\) gave"):
        evaluated(said)


@pytest.mark.parametrize(
    "raw",
    [
        [], {"a": [[1, 2]]}, {"a": [[1], [2]]}, {"a": [[1, 2], [3]]}, {"a": [[1, -2], [0, 0]]}, {"": [[1, 2], [3, 4]]},
        {"a": [[1, 2.0], [0, 0]]}, {"a": [[True, 2], [0, 0]]}, {"a": [[1, 2**41], [0, 0]]}, {"a": [[0] * 514] * 2},
        {str(n): [[0, 0], [0, 0]] for n in range(5)}, {"n" * 59: [[0, 0], [0, 0]]}, {"a": [1, 2]}, {"a": "text"},
    ],
)  # fmt: skip
def test_an_aggregator_reads_no_histogram_beyond_the_bounds(raw: Any) -> None:
    with pytest.raises(ValueError, match="histogram"):
        checked(raw)
    assert checked({"a": [[0, 1], [2, 3]]}) == {"a": [[0, 1], [2, 3]]}


def test_worker_and_aggregator_know_the_same_bounds() -> None:
    assert (BINS, MAX_HISTOGRAMS) == (score_histogram.MAX_BINS, score_histogram.MAX_HISTOGRAMS)
