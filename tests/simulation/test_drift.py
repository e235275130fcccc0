"""Devices whose data differ: where FedAvg stops beside the optimum, SCAFFOLD and FedDyn reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.small_task import task_of
from thinwire.client.task_check import rehearse
from thinwire.client.train.protocol import ClientInfo, Split
from thinwire.core import RunPlan
from thinwire.core.statedir import AggregatorHome
from thinwire.reports.stored_models import stored_model
from thinwire.simulation import History, run_sim, simulate
from thinwire.store import Store

CURVES = ((1.0, 0.2, 3.0), (0.1, 2.0, 0.5), (2.0, 1.0, 0.1))  # of each client's loss, by coordinate
PLACES = ((1.0, -2.0, 0.5), (-3.0, 1.0, 2.0), (0.5, 4.0, -1.0))  # where each client's loss is least
SIZES = (8, 16, 24)  # examples, all alike: what a client weighs


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3))


def data(client: ClientInfo) -> Split:
    i = client.partition
    rows = torch.tensor([*CURVES[i], *PLACES[i]]).repeat(SIZES[i], 1)
    return Split(TensorDataset(rows), TensorDataset(rows))


def loss(model: Any, batch: Any) -> torch.Tensor:
    (rows,) = batch
    found: torch.Tensor = (rows[:, :3] * (model.at - rows[:, 3:]) ** 2).sum(1).mean() / 2
    return found


def optimum() -> np.ndarray:
    """Of the mean loss over all examples."""
    weighed = np.array(SIZES)[:, None] * np.array(CURVES)
    found: np.ndarray = (weighed * np.array(PLACES)).sum(0) / weighed.sum(0)
    return found


def least() -> float:
    off = (np.array(CURVES) * (optimum() - np.array(PLACES)) ** 2).sum(1) / 2
    return float((off * np.array(SIZES)).sum() / sum(SIZES))


def plan_of(algorithm: str, rounds: int = 40, **sections: dict[str, Any]) -> RunPlan:
    raw: dict[str, Any] = {
        "run": {"task": "small", "algorithm": algorithm, "rounds": rounds},
        "cohort": {"late": "drop"},
        "local": {"lr": 0.1, "steps": 20, "batch": 64},
        "uplink": {"codec": "identity"},
    }
    if algorithm == "feddyn":
        raw["run"]["alpha"] = 0.5
    for name, keys in sections.items():
        raw[name] = raw.get(name, {}) | keys
    return RunPlan.from_json(raw)


def run(algorithm: str, rounds: int = 20, **sections: dict[str, Any]) -> History:
    return simulate(task_of(Point, data=data, loss=loss), plan_of(algorithm, rounds, **sections), clients=3)


def excess(history: History) -> float:
    return float(history.metrics["loss"] - least())


@pytest.mark.parametrize(("algorithm", "reaches"), [("fedavg", False), ("scaffold", True), ("feddyn", True)])
def test_the_optimum_is_reached_where_a_devices_drift_is_corrected(algorithm: str, reaches: bool) -> None:
    assert (excess(run(algorithm)) < 1e-4) == reaches


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_it_is_reached_through_codecs_both_ways_whoever_is_selected(algorithm: str) -> None:
    codecs = {"uplink": {"codec": "topk(0.34) > int8"}, "downlink": {"codec": "int8"}}
    history = run(algorithm, 44, cohort={"clients": 2}, local={"momentum": 0.5}, **codecs)
    assert excess(history) < 1e-3


def test_where_all_devices_are_alike_those_that_are_selected_first_go_no_further_than_fedavg() -> None:
    """They are in no mean yet: by the others' mean gradient beside their own they would go twice as far."""

    def alike(client: ClientInfo) -> Split:
        rows = torch.tensor([*CURVES[0], *PLACES[0]]).repeat(8, 1)
        return Split(TensorDataset(rows), TensorDataset(rows))

    task, cohort = task_of(Point, data=alike, loss=loss), {"late": "drop", "clients": 2}
    losses = [
        simulate(task, plan_of(algorithm, 2, cohort=cohort, local={"lr": 0.3, "steps": 3}), clients=12).metrics["loss"]
        for algorithm in ("fedavg", "scaffold")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] < 0.5


def test_the_control_variate_alone_costs_bytes_and_only_the_model_is_measured() -> None:
    plain, scaffold, feddyn = (run(algorithm, 2) for algorithm in ("fedavg", "scaffold", "feddyn"))
    assert plain.run.payload_up == feddyn.run.payload_up
    assert scaffold.run.payload_up == 2 * plain.run.payload_up
    assert set(scaffold.metrics) == set(plain.metrics)


def test_a_rehearsal_counts_the_bytes_of_what_travels_beside_the_model() -> None:
    task = task_of(Point, data=data, loss=loss)
    plain, doubled = (rehearse(task, ClientInfo(), plan_of(algorithm)) for algorithm in ("fedavg", "scaffold"))
    assert (doubled.up_bytes, doubled.down_bytes) == (2 * plain.up_bytes, 2 * plain.down_bytes)
    assert doubled.dense_bytes == plain.dense_bytes


def test_what_is_read_of_a_run_is_the_model_alone(tmp_path: Path) -> None:
    task, plan, home = task_of(Point, data=data, loss=loss), plan_of("scaffold", 2), AggregatorHome.under(tmp_path)
    with Store.open(home.database) as store:
        run_id = run_sim(plan, task, store=store, home=home, clients=3, client=ClientInfo())
        whole, model = store.run(run_id), stored_model(store, home, run_id, "last")
    assert model.params.shape == (3,)
    assert model.row.digest == whole.model_digest
    assert model.export(tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["at"].tolist() == model.params.tolist()
