"""`benchmarks.personal`, which a page is drawn from; which method is better is not asserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import personal
from benchmarks.drift import CLIENTS, SPLIT
from benchmarks.personal import (
    BOTH,
    CLASSES,
    FEDAVG,
    FEDBN,
    FEDPER,
    GLOBS,
    MODELS,
    Preset,
    common_test_set,
    data,
    figures,
    measure,
    measure_one,
    plan_of,
)
from tests.support.small_task import task_of
from thinwire.aggregation import codecs
from thinwire.client import ClientInfo
from thinwire.client.task import initial_model


def test_every_client_has_a_row() -> None:
    rows = measure_one("digits", FEDPER, 1, 1)
    assert len({row["client"] for row in rows}) == len(rows) == CLIENTS
    assert all(0.0 <= row["accuracy"] <= 1.0 for row in rows)


def test_a_run_that_the_file_has_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, kept = Preset(("digits",), 1, 1), tmp_path / "runs.jsonl"
    rows = measure(preset, 1, kept)
    assert {row["method"] for row in rows} == set(GLOBS)
    monkeypatch.setattr(personal, "measure_one", None)
    assert measure(preset, 1, kept) == rows


def test_each_label_of_the_common_test_set_weighs_what_it_is_of_the_clients_own_examples() -> None:
    trained, of_labels = 0, []
    for number in range(CLIENTS):
        split = data(ClientInfo(partition=number, partitions=CLIENTS, split=SPLIT, seed=21))
        labels, (_, tested, weights) = split.train.tensors[1], split.test.tensors
        shares = np.bincount(labels, minlength=CLASSES) / len(labels)
        np.testing.assert_allclose(np.bincount(tested, weights, CLASSES), shares)
        trained += len(labels)
        of_labels.append(np.bincount(tested, minlength=CLASSES))
    assert len(set(map(tuple, of_labels))) == 1 and of_labels[0].min() >= 58
    assert trained == (~common_test_set()).sum(), "nobody trains on the test set, and all train on the rest"


def test_the_gain_is_that_of_the_best_method_on_the_worst_client_of_the_model_that_gains_less() -> None:
    worst = {
        ("digits", FEDAVG): 0.5, ("digits", FEDBN): 0.4, ("digits", FEDPER): 0.7, ("digits", BOTH): 0.6,
        ("cnn", FEDAVG): 0.8, ("cnn", FEDBN): 0.6, ("cnn", FEDPER): 0.6, ("cnn", BOTH): 0.9,
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
    kept = {name: sizes[name, FEDAVG] - sizes[name, BOTH] for name in MODELS}
    assert kept == {"digits": {"norm", "head"}, "cnn": {"norm", "head"}}
