"""Tests of what `simulate` gives a notebook: the model, rows of clients, callbacks, a line of progress, its failure."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_task import examples, normed, plan_of, task_of
from thinwire import simulate
from thinwire.client import ClientInfo, Split
from thinwire.core import RunPlan
from thinwire.core.errors import NotFound, ThinwireError, UsageError
from thinwire.core.events import Evaluated, RoundClosed
from thinwire.simulation import RunFailed
from thinwire.simulation.history import Progress

PLAN = plan_of(run="rounds = 3")


@pytest.mark.parametrize(
    ("task", "plan"), [("digits", PLAN), ("mine=x.py", {"run": {"task": "a b"}, "local": {"lr": 1}})]
)
def test_a_name_that_is_none_is_refused_without_an_option_that_a_notebook_does_not_have(task: str, plan: Any) -> None:
    with pytest.raises(ThinwireError, match="is not valid") as refused:
        simulate(task, plan, clients=2)
    assert "NAME=MODULE" in refused.value.why
    assert "--" not in f"{refused.value} {refused.value.why} {refused.value.hint}"


def test_the_model_has_the_tensors_and_the_metrics_of_the_last_version() -> None:
    task = task_of(normed)
    history = simulate(task, PLAN, clients=3)
    module = history.model()
    assert not module.training
    first = dict(task.module.model().state_dict())
    state = module.state_dict()
    assert state.keys() == first.keys()
    assert any(not torch.equal(state[name], first[name]) for name in state)
    counted = [0.0, 0.0]
    for part in range(3):
        split = task.module.data(ClientInfo(name=f"sim-{part}", partition=part, partitions=3))
        loader = torch.utils.data.DataLoader(split.test, batch_size=len(split.test))
        with torch.no_grad():
            for batch in loader:
                counted[0] += float(task.module.loss(module, batch)) * len(split.test)
                counted[1] += len(split.test)
    assert history.metrics["loss"] == pytest.approx(counted[0] / counted[1], rel=1e-5)
    assert history.model() is not module, "each call makes a module of its own"


def test_a_row_a_client_and_round_says_what_each_did() -> None:
    history = simulate(task_of(), PLAN, clients=3)
    rows = history.client_records()
    assert [(row["round"], row["client"]) for row in rows] == [
        (number, f"sim-{part}") for number in (1, 2, 3) for part in range(3)
    ]
    assert {row["outcome"] for row in rows} == {"aggregated"}
    assert sum(row["payload_up"] for row in rows) == history.payload_up
    assert len(history.records()) == 3


COVERED = """
[run]
task = "small"
rounds = 2
evaluate = "off"
[cohort]
{clients}
deadline_s = 60
late = "drop"
[local]
lr = 0.1
batch = 8
steps = 3
buffers = "local"
{covered}
"""
PRIVATE = '[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\ndelta = 1e-3\n'
FACTS = ("examples", "steps", "train_s", "norm", "residual_norm")


@pytest.mark.parametrize("covered", ["[secure]\nenabled = true\n", PRIVATE, PRIVATE.replace("central", "local")])
def test_what_no_client_tells_is_none_in_its_row_and_no_zero(covered: str) -> None:
    plan = RunPlan.parse(COVERED.format(clients="clients = 4", covered=covered))
    rows = simulate(task_of(), plan, clients=4).client_records()
    assert len(rows) == 8
    assert [row["outcome"] for row in rows] == ["aggregated"] * 8
    assert [[row[name] for name in FACTS] for row in rows] == [[None] * 5] * 8
    assert {name for row in rows for name in row} & {"loss", "accuracy"} == set(), "and no metric"
    assert all(row["examples"] and row["steps"] for row in simulate(task_of(), PLAN, clients=4).client_records())


def test_the_history_of_a_sampled_run_has_no_clients_and_no_count_of_them() -> None:
    plan = RunPlan.parse(COVERED.format(clients="", covered=f"{PRIVATE}sampling_rate = 0.5\n"))
    history = simulate(task_of(), plan, clients=4)
    assert history.client_records() == []
    hidden = ("selected", "aggregated", "late", "dropped", "failed", "payload_up", "payload_down")
    assert [[row[name] for name in hidden] for row in history.records()] == [[None] * 7] * 2
    assert history.payload_up is None, "and no 0, by which a notebook would divide"


def test_callbacks_get_each_round_and_each_evaluation_and_their_exception_ends_the_call() -> None:
    rounds, evaluations = list[RoundClosed](), list[Evaluated]()
    history = simulate(task_of(), PLAN, clients=2, on_round=rounds.append, on_evaluate=evaluations.append)
    assert [event.round for event in rounds] == [1, 2, 3]
    assert evaluations[-1].metrics == history.metrics

    def enough(event: RoundClosed) -> None:
        raise KeyError(event.round)

    with pytest.raises(KeyError, match="1"):
        simulate(task_of(), PLAN, clients=2, on_round=enough)


def test_a_run_that_fails_raises_its_reason_and_keeps_its_history() -> None:
    class Broken:
        def model(self) -> nn.Module:
            return nn.Linear(4, 2)

        def data(self, client: ClientInfo) -> Any:
            return torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))

        def loss(self, model: nn.Module, batch: Any) -> Any:
            raise ValueError("a label")

    plan = {"run": {"task": "mine", "rounds": 2}, "local": {"lr": 0.1}, "cohort": {"retry_limit": 0}}
    with pytest.raises(RunFailed) as failed:
        simulate(Broken(), plan, clients=2)
    error = failed.value
    assert error.exit_code == 6
    assert "ValueError at test_history.py" in error.why and "a label" not in error.text()
    assert error.history.rounds[0].reason == "too-few"
    assert error.__notes__ == [f"try: {error.hint}"]


def test_a_cell_that_ends_in_a_history_shows_one_line() -> None:
    history = simulate(task_of(), PLAN, clients=2)
    loss = history.metrics["loss"]
    assert re.fullmatch(rf"<History of small-1: done, 3 rounds, .*loss {loss:.4g}>", repr(history))


def test_the_name_of_a_reduction_belongs_into_the_plan() -> None:
    with pytest.raises(UsageError, match="'median' is a text") as raised:
        simulate(task_of(), PLAN, clients=2, reduce="median")  # type: ignore[arg-type]
    assert raised.value.hint == '[server] reduce or optimizer = "median" in the plan'


def test_data_may_be_a_text(tmp_path: Path) -> None:
    seen = set[Any]()

    def data(client: Any) -> Split:
        seen.add(client.data)
        return Split(examples(), examples(6, 4))

    simulate(task_of(data=data), PLAN, clients=2, data=str(tmp_path))
    assert seen == {tmp_path}


def test_a_history_without_a_model_says_why() -> None:
    history = simulate(task_of(), PLAN, clients=2)
    with pytest.raises(NotFound, match="has no model"):
        type(history)(history.run, history.rounds).model()


def test_progress_is_one_line_that_is_written_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    simulate(task_of(), PLAN, clients=2, progress=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.count("\r") == 3
    assert "round 3 of 3" in said and "loss" in said
    simulate(task_of(), PLAN, clients=2)
    assert capsys.readouterr().err == "", "no terminal, no notebook"
    out = io.StringIO()
    Progress(3, out).end()
    assert out.getvalue() == ""
