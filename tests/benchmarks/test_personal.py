"""`benchmarks.personal`, which a page is drawn from; which method is better is not asserted."""

from __future__ import annotations

import pytest

from benchmarks.drift import CLIENTS
from benchmarks.personal import FEDAVG, FEDBN, FEDPER, GLOBS, MODELS, figures, measure_one, plan_of
from tests.support.small_task import task_of
from thinwire.aggregation import codecs
from thinwire.client.task import initial_model


def test_every_client_has_a_row() -> None:
    rows = measure_one("digits", FEDPER, 1, 1)
    assert len({row["client"] for row in rows}) == len(rows) == CLIENTS
    assert all(0.0 <= row["accuracy"] <= 1.0 for row in rows)


def test_the_gain_is_that_of_the_better_method_on_the_worst_client_of_the_model_that_gains_less() -> None:
    worst = {
        ("digits", FEDAVG): 0.5, ("digits", FEDBN): 0.4, ("digits", FEDPER): 0.7,
        ("cnn", FEDAVG): 0.8, ("cnn", FEDBN): 0.9, ("cnn", FEDPER): 0.6,
    }  # fmt: skip
    rows = [
        {"model": model, "method": method, "seed": seed, "client": client, "accuracy": least + 0.1 * client + 0.02 * up}
        for (model, method), least in worst.items()
        for seed, up in ((11, 1), (12, -1))
        for client in (0, 1)
    ]
    found = figures(rows)
    assert found["worst digits FedPer"] == pytest.approx(0.7)
    assert found["mean digits FedPer"] == pytest.approx(0.75)
    assert found["worst_client_gain digits"] == pytest.approx(0.2)
    assert found["worst_client_gain"] == found["worst_client_gain cnn"] == pytest.approx(0.1)


def test_each_method_keeps_the_layers_of_its_paper_and_a_user_may_run_its_plan() -> None:
    sizes = {}
    for (name, model), method in ((one, method) for one in MODELS.items() for method in GLOBS):
        assert not plan_of(method, 20, 11).check(codecs)
        layout = initial_model(task_of(model), 1, GLOBS[method]).layout
        sizes[name, method] = {t.name.partition(".")[0].rstrip("12") for t in layout.trained}
    assert {name: sizes[name, FEDAVG] - sizes[name, FEDBN] for name in MODELS} == {"digits": {"norm"}, "cnn": {"norm"}}
    assert {name: sizes[name, FEDAVG] - sizes[name, FEDPER] for name in MODELS} == {"digits": {"head"}, "cnn": {"head"}}
