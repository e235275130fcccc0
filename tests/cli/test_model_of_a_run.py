"""`thinwire runs model`: which version it takes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open

from tests.support.cli_story import PARAMS, evaluated, told
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store


@pytest.mark.parametrize(("which", "version"), [("last", 2), ("best", 2), ("1", 1), ("0", 0)])
def test_a_model_is_taken_by_its_round(thinwire, home, tmp_path, which, version):
    told(home, plan='[run]\ntask = "toy"\nrounds = 2\nkeep = "all"\n[local]\nlr = 0.5')
    out = tmp_path / "model.safetensors"
    found = thinwire("runs", "model", "toy-1", "--round", which, "--out", out, "--json", "--home", home).document
    assert found["version"] == version
    with safe_open(out, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("first.weight").reshape(-1), PARAMS[:6] + version)
        about = file.metadata()
    assert (about["run"], about["version"], about["digest"]) == ("toy-1", str(version), found["digest"])


def test_a_model_has_every_name_of_its_state_dict(thinwire, home, tmp_path):
    told(home)
    out = tmp_path / "model.safetensors"
    thinwire("runs", "model", "toy-1", "--out", out, "--home", home)
    with safe_open(out, framework="numpy") as file:
        assert set(file.keys()) == {
            "first.weight", "first.bias", "second.weight", "norm.running_mean", "norm.num_batches_tracked",
        }  # fmt: skip
        np.testing.assert_array_equal(file.get_tensor("second.weight"), file.get_tensor("first.weight"))
        assert file.get_tensor("norm.num_batches_tracked") == np.int64(14)
        assert file.get_tensor("norm.num_batches_tracked").dtype == np.int64


def test_a_model_without_personal_layers_says_which_are_not_in_it(thinwire, home, tmp_path):
    told(home, plan='[run]\ntask = "toy"\nrounds = 2\n[local]\nlr = 0.5\npersonal_layers = ["head.*"]')
    said = thinwire("runs", "model", "toy-1", "--out", tmp_path / "model.safetensors", "--home", home)
    assert "not in it: the personal layers head.*, which each client keeps" in said.out


def test_a_file_that_is_there_is_not_written_over(thinwire, home, tmp_path):
    told(home)
    out = tmp_path / "model.safetensors"
    out.write_text("somebody's")
    said = thinwire("runs", "model", "toy-1", "--out", out, "--home", home)
    assert (said.code, said.out, out.read_text()) == (2, "", "somebody's")
    assert said.err.startswith(f"error: {out} is there already\nwhy:   nothing is overwritten\ntry:   another name")


@pytest.mark.parametrize(("which", "code"), [("7", 9), ("newest", 2), ("²", 2), ("9" * 5000, 2)])
def test_a_round_that_is_not_there_is_refused(thinwire, home, tmp_path, which, code):
    told(home)
    said = thinwire("runs", "model", "toy-1", "--round", which, "--out", tmp_path / "m.safetensors", "--home", home)
    assert said.code == code
    assert not (tmp_path / "m.safetensors").exists()


def test_a_model_that_was_pruned_is_said_to_be_gone(thinwire, home, tmp_path):
    told(home)
    (AggregatorHome.under(home).run("toy-1") / "v000001.model").unlink()
    said = thinwire("runs", "model", "toy-1", "--round", "1", "--out", tmp_path / "m.safetensors", "--home", home)
    assert said.code == 9
    assert '[run] keep = "all"' in said.err


@pytest.mark.parametrize("which", ["last", "best", "2"])
def test_an_untrained_model_is_given_to_nobody_who_did_not_request_it(thinwire, home, tmp_path, which):
    run_id, out = told(home, "failed", 6, steps=False), tmp_path / "m.safetensors"
    said = thinwire("runs", "model", run_id, "--round", which, "--out", out, "--home", home)
    assert (said.code, out.exists()) == (9, False)
    assert said.err == (
        "error: toy-1 has no trained model: no round of it has made a step\nwhy:   it is failed: 2 rounds\n"
        "try:   --round 0, which is the model that it began with ([run] init: run:toy-1@0)\n"
    )
    given = thinwire("runs", "model", run_id, "--round", "0", "--out", out, "--json", "--home", home)
    assert (given.code, given.document["version"]) == (0, 0)


def test_a_run_whose_best_model_is_its_first_says_so(thinwire, home, tmp_path):
    run_id, out = told(home), tmp_path / "m.safetensors"
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record(run_id, [replace(evaluated(1), version=0, metrics={"loss": 0.1}, best=True)])
    said = thinwire("runs", "model", run_id, "--round", "best", "--out", out, "--home", home)
    assert said.code == 9
    assert f"the best model of {run_id} is the one that it began with" in said.err
    assert thinwire("runs", "model", run_id, "--out", out, "--home", home).code == 0


def test_a_damaged_model_is_not_given_out(thinwire, home, tmp_path):
    told(home)
    path = AggregatorHome.under(home).run("toy-1") / "v000002.model"
    path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    said = thinwire("runs", "model", "toy-1", "--out", tmp_path / "m.safetensors", "--home", home)
    assert said.code == 8
    assert not (tmp_path / "m.safetensors").exists()
