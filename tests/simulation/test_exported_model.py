"""Law: the exported model, loaded in plain torch, has the accuracy that the run has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.system.mixed.plainly import accuracy
from thinwire.cli.app import main

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
    assert {"order", "mask", "turn", "features.weight", "norm.running_mean"} <= set(found["tensors"])


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
