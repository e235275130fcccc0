"""Law: the exported model, loaded in plain torch, has the accuracy that the run has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.system.mixed.plainly import accuracy
from thinwire.cli.main import main
from thinwire.client.task import load_task

SENSORS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import Split


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.tensor([0.485, 0.456, 1.7e9, 1e-30, -0.0]))
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, values):
        return self.out(self.norm(values))


def model():
    return Model()


def sensed(part):
    draw = torch.Generator().manual_seed(part)
    values = torch.randn(100 + 50 * part, 4, generator=draw) + 0.1 * part
    values = values * torch.tensor([2.0, 50.0, 3.0, 0.01]) + torch.tensor([293.0, 101325.0, 2010.0, 0.0])
    return values  # K, Pa, a year, a ratio


def data(client):
    values = sensed(client.partition)
    labels = (values[:, 3] > 0).long()
    return Split(TensorDataset(values, labels), TensorDataset(values, labels))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
MASKED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import Split


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 16)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, tokens):
        found = self.embedding(tokens)
        return self.out(self.attention(found, found, found, attn_mask=self.mask)[0])


def model():
    return Model()


def data(client):
    tokens = torch.randint(0, 16, (20, 6), generator=torch.Generator().manual_seed(client.partition))
    return Split(TensorDataset(tokens), TensorDataset(tokens))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())
"""
STEPS, ROUNDS = 20, 2
MIXED = Path(__file__).parents[1] / "system" / "mixed"


def sim(home: Path, *more: str) -> None:
    words = ["sim", str(MIXED / "plan.toml"), "--clients", "3", "--home", str(home), *more]
    assert main([*words, "--set", "run.rounds=2"]) == 0


def exported(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["runs", "model", "latest", "--out", str(out), "--json", "--home", str(home)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("more", [(), ("--processes", "2")], ids=["one process", "two processes"])
def test_the_exported_model_scores_what_the_simulation_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    sim(tmp_path / "home", *more)
    found = exported(tmp_path / "home", tmp_path / "model.safetensors", capsys)
    assert found["metrics"]["accuracy"] > 0.5
    plain = accuracy(tmp_path / "model.safetensors", 3)
    assert plain == pytest.approx(found["metrics"]["accuracy"], abs=1e-9)
    assert {"order", "mask", "turn", "least", "features.weight", "norm.running_mean"} <= set(found["tensors"])


@pytest.mark.parametrize("kept", ["local", "frozen"])
def test_the_export_says_that_its_statistics_are_no_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    sim(tmp_path / "home", "--set", f"local.buffers={kept}")
    capsys.readouterr()
    out = tmp_path / "model.safetensors"
    assert main(["runs", "model", "latest", "--out", str(out), "--home", str(tmp_path / "home")]) == 0
    said = f'those of the first model, not of any client: [local] buffers = "{kept}"'
    assert said in capsys.readouterr().out
    with safe_open(out, framework="numpy") as file:
        assert file.metadata()["buffers"] == said


def test_a_run_goes_on_from_an_exported_model_and_refuses_one_with_other_fixed_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sim(tmp_path / "home")
    out = tmp_path / "model.safetensors"
    exported(tmp_path / "home", out, capsys)
    sim(tmp_path / "home", "--set", f"run.init={out}")
    tensors = load_file(out)
    save_file({**tensors, "order": tensors["order"][::-1].copy()}, tmp_path / "other.safetensors")
    words = ["sim", str(MIXED / "plan.toml"), "--clients", "3", "--home", str(tmp_path / "home")]
    assert main([*words, "--set", f"run.init={tmp_path / 'other.safetensors'}"]) == 3
    assert "has another order than the task's model()" in capsys.readouterr().err


def test_a_causal_mask_of_minus_infinity_trains_and_is_exported_as_it_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(MASKED)
    (tmp_path / "plan.toml").write_text('[run]\ntask = "task"\nrounds = 2\n[local]\nlr = 0.1\n')
    task = f"task={tmp_path / 'task.py'}"
    for kept in ("average", "local", "frozen"):
        words = ["sim", str(tmp_path / "plan.toml"), "--clients", "2", "--set", f"local.buffers={kept}"]
        assert main([*words, "--home", str(tmp_path / kept), "--task", task]) == 0
        exported(tmp_path / kept, tmp_path / f"{kept}.safetensors", capsys)
        made = load_task(task).module.model().mask.numpy()
        assert load_file(tmp_path / f"{kept}.safetensors")["mask"].tobytes() == made.tobytes()


def averaged_plainly(task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The running mean and variance of plain FedAvg: by examples, and by the law of total variance."""
    mean, variance = torch.zeros(4), torch.ones(4)
    all_values = [task.sensed(part) for part in range(3)]
    examples = torch.tensor([[float(len(values))] for values in all_values], dtype=torch.float64)
    share = examples / examples.sum()
    for _ in range(ROUNDS):
        norms = [torch.nn.BatchNorm1d(4) for _ in all_values]
        for norm, values in zip(norms, all_values, strict=True):
            norm.running_mean, norm.running_var = mean.clone(), variance.clone()
            for _ in range(STEPS):
                norm(values)
        means, variances = (
            torch.stack([getattr(n, f"running_{of}") for n in norms]).double() for of in ("mean", "var")
        )
        middle = (share * means).sum(0)
        mean, variance = middle.float(), (share * (variances + (means - middle) ** 2)).sum(0).float()
    return mean, variance


def test_averaged_statistics_are_those_of_plain_fedavg_and_a_constant_keeps_its_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(SENSORS)
    (tmp_path / "plan.toml").write_text(
        f'[run]\ntask = "task"\nrounds = {ROUNDS}\n[local]\nlr = 0.3\nsteps = {STEPS}\nbatch = 1000\n'
    )
    words = ["sim", str(tmp_path / "plan.toml"), "--clients", "3", "--home", str(tmp_path / "home")]
    assert main([*words, "--task", f"task={tmp_path / 'task.py'}"]) == 0
    exported(tmp_path / "home", tmp_path / "model.safetensors", capsys)
    tensors, task = load_file(tmp_path / "model.safetensors"), load_task(f"task={tmp_path / 'task.py'}").module
    mean, variance = averaged_plainly(task)
    assert tensors["norm.running_mean"] == pytest.approx(mean.numpy(), rel=1e-6, abs=1e-9)
    assert tensors["norm.running_var"] == pytest.approx(
        variance.numpy(), rel=3e-4
    )  # rows in another order move a mean of 1e5
    assert tensors["constant"].tobytes() == task.Model().constant.numpy().tobytes()
