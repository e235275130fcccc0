"""The examples of docs/how/tabular.md and docs/how/batch-norm.md, whose packages the ordinary tests have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier

from thinwire.client.adapters import sklearn
from thinwire.core import RunPlan
from thinwire.simulation import History, simulate

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, **changed: str) -> History:
    plan = RunPlan.load(
        EXAMPLES / name / "plan.toml", {key.replace("__", "."): value for key, value in changed.items()}
    )
    return simulate(f"{name}={EXAMPLES / name / 'task.py'}", plan, clients=4)


def test_a_table_is_learned_and_becomes_a_fitted_estimator() -> None:
    found = run("tabular", run__rounds="4")
    assert found.metrics["accuracy"] > 0.9
    assert 0.97 < found.metrics["benign_auc"] <= 1, "of all clients' test rows together"
    model = found.model()
    estimator = sklearn.fitted(SGDClassifier(), model.state_dict(), [0, 1])
    rows, labels = load_breast_cancer(return_X_y=True)
    scaled = np.log(rows / rows.mean(0) + 0.1)
    assert estimator.score(scaled, labels) > 0.9


def test_batch_normalization_of_its_own_helps_a_client_whose_camera_differs() -> None:
    """FedBN; the same with all layers shared is worse: the statistics of one camera are not those of another."""
    shared = run("batch_norm", run__rounds="2", local__personal_layers="[]").metrics["accuracy"]
    assert run("batch_norm", run__rounds="2").metrics["accuracy"] > shared + 0.1
