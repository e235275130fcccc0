"""Whole-set metrics: AUC and F1 of all clients' test sets together, which no mean over clients gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.small_task import cross_entropy, task_of
from thinwire import simulate
from thinwire.client import ClientInfo, LoadedTask, Split, histogram
from thinwire.core import RunPlan
from thinwire.core.events import Evaluated, Event
from thinwire.server.context import RunContext

SHIFTS = (0.8, -0.8, 1.6, -1.6)  # of a client's inputs: a rare class here is the usual one there


def examples(client: int, count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(100 * seed + client)
    inputs = torch.randn(count, 4, generator=draw) + SHIFTS[client % 4]
    noise = torch.randn(count, generator=draw)
    return TensorDataset(inputs, (inputs.sum(1) + 2 * noise > 0).long())


def data(client: ClientInfo) -> Split:
    return Split(examples(client.partition, 60, 1), examples(client.partition, 400, 2))


def scored(model: nn.Module, found: TensorDataset) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = found.tensors
    with torch.no_grad():
        return model(inputs).softmax(1)[:, 1], labels


def evaluate(model: nn.Module, test: Any) -> dict[str, Any]:
    return {"sick": histogram(*scored(model, test)), "largest": float(scored(model, test)[0].max())}


def task(**more: Any) -> LoadedTask:
    return task_of(lambda: nn.Linear(4, 2), data=data, loss=cross_entropy, evaluate=evaluate, **more)


def train(model: nn.Module, data: Any, context: Any) -> int:
    """Lead the bias a step on, and report what a loop knows."""
    with torch.no_grad():
        model.get_parameter("bias").add_(torch.tensor([-0.1, 0.1]) * (1 + data[0][0].mean().sign()))
    context.report("depth", context.round, count=len(data))
    context.report("unnamed", 1.0)
    return len(data)


def plan(text: str = "", run: str = "") -> RunPlan:
    return RunPlan.parse(f'[run]\ntask = "small"\nrounds = 3\n{run}\n[local]\nlr = 0.2\n{text}')


def test_the_pooled_auc_is_scikit_learns_on_pooled_predictions() -> None:
    heard = list[Evaluated]()
    made = simulate(task(), plan(run='metric = "sick_auc"'), clients=4, on_evaluate=heard.append)
    model = made.model()
    predicted = [scored(model, examples(client, 400, 2)) for client in range(4)]
    scores, labels = (torch.cat(parts).numpy() for parts in zip(*predicted, strict=True))
    exact = roc_auc_score(labels, scores)
    assert made.metrics["sick_auc"] == pytest.approx(exact, abs=0.002)
    assert made.metrics["sick_f1"] == pytest.approx(f1_score(labels, scores >= 0.5))
    own = [roc_auc_score(labels.numpy(), scores.numpy()) for scores, labels in predicted]
    assert abs(sum(own) / 4 - exact) > 0.02, "the mean over clients is another number"
    assert heard[-1].spread["sick_auc"] == pytest.approx([min(own), max(own)], abs=0.01)
    assert made.run.best_value == max(event.metrics["sick_auc"] for event in heard)
    assert made.metrics["largest"] == pytest.approx(sum(float(s.max()) for s, _ in predicted) / 4)


def test_a_buffered_run_pools_them_from_its_journal() -> None:
    made = simulate(task(), plan('[cohort]\nmode = "buffered"\nbuffer = 2'), clients=4, step_s=[0.1] * 4)
    assert 0.5 < made.metrics["sick_auc"] < 1


def test_killed_at_any_record_it_goes_on_to_the_same_metrics(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    record, passed, dies_at = RunContext.record, 0, 10**9

    def counted(self: RunContext, *events: Event, **more: Any) -> None:
        nonlocal passed
        record(self, *events, **more)
        passed += 1
        if passed == dies_at:
            raise Killed

    monkeypatch.setattr(RunContext, "record", counted)

    def run(folder: str) -> dict[str, float]:
        return dict(simulate(task(), plan(), clients=4, home=tmp_path / folder, step_s=[0.1] * 4).metrics)

    whole, records = run("whole"), passed
    for at in range(2, records, 7):
        passed, dies_at = 0, at
        with pytest.raises(Killed):
            run(str(at))
        dies_at = 10**9
        assert run(str(at)) == whole, f"killed after record {at} of {records}"


def test_under_masks_histograms_and_metrics_of_training_come_as_sums_and_no_client_has_rows() -> None:
    cohort = 'steps = 2\nbuffers = "local"\n[cohort]\nclients = 4\nlate = "drop"\ndeadline_s = 60\n'
    cohort += 'max_weight = "none"\n'
    sums = 'metrics = { loss = 10.0, largest = 1.0, "train/depth" = 10.0 }\nhistograms = ["sick"]\n'
    secure = "[secure]\nenabled = true\nmax_dropout = 0.25\nmax_corrupt = 0.25\nweight_max = 1000\n" + sums
    own, run = task(train=train), 'metric = "sick_auc"'
    hidden = simulate(own, plan(cohort + secure, run), clients=4)
    clear = simulate(own, plan(cohort + '[uplink]\ncodec = "identity"', run), clients=4)
    assert [row.reason for row in hidden.rounds] == ["all"] * 3, hidden.failures
    assert {"sick_auc", "sick_f1", "loss", "largest"} == set(hidden.run.metrics0)
    wanted = {name: clear.run.metrics0[name] for name in hidden.run.metrics0}
    assert hidden.run.metrics0 == pytest.approx(wanted, abs=2e-3), "both of version 0"
    assert hidden.rounds[1].metrics.keys() == hidden.run.metrics0.keys()
    assert [row.train_metrics for row in hidden.rounds] == [{"depth": pytest.approx(number)} for number in (1, 2, 3)]
    assert [row.spread for row in hidden.rounds] == [{}] * 3
