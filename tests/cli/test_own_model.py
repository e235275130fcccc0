"""From `thinwire init` to a file that torch loads without us: what a person does with a model of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.support.shell_blocks import ROOT
from thinwire.client import load_task
from thinwire.core.errors import TaskError
from thinwire.core.layout import Layout, Tensor
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.server.model_files import read_model_file
from thinwire.simulation import simulate
from thinwire.store import Store

OTHER_EACH_TIME = """
    import itertools
    ids = itertools.count()
    def model():
        net = nn.Linear(2, 2)
        net.register_buffer("order", torch.randperm(64, generator=torch.Generator().manual_seed(next(ids))))
        return net
"""
CHANGES_WHAT_IS_FROZEN = """
    def model():
        return nn.Sequential(nn.Linear(2, 4).requires_grad_(False), nn.Linear(4, 2))
    def loss(model, batch):
        model[0].weight.data.add_(1.0)
        return model(batch[0]).sum()
"""


@pytest.fixture
def mine(thinwire, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert thinwire("init", "mine").code == 0
    return tmp_path / "mine"


def broken(mine, **replaced):
    """The template with some of its functions replaced."""
    text = "\n".join(["from mine.task import *", *(textwrap.dedent(code) for code in replaced.values())])
    path = mine.parent / "broken.py"
    path.write_text(text)
    return path


def test_data_that_are_not_there_are_noted_and_the_task_decides(thinwire, tmp_path):
    assert thinwire("init", tmp_path / "mine").code == 0
    words = ("task", "check", tmp_path / "mine" / "task.py", "--data")
    said = thinwire(*words, tmp_path / "none")
    assert (said.code, f"there is no {tmp_path / 'none'} (--data)" in said.err) == (0, True)
    assert "--data" not in thinwire(*words, tmp_path).err


def test_the_files_are_short_and_not_overwritten(thinwire, mine):
    code = [line for line in (mine / "task.py").read_text().splitlines() if line and not line.startswith(("#", '"'))]
    assert len(code) <= 30
    plan = [line for line in (mine / "plan.toml").read_text().splitlines() if "=" in line]
    assert len(plan) == 2
    assert thinwire("init", mine).code == 2


def test_check_says_what_a_round_costs(thinwire, mine):
    found = thinwire("task", "check", mine / "task.py", "--plan", mine / "plan.toml", "--json").document
    assert (found["parameters"], found["train_examples"], found["test_examples"]) == (4482, 3200, 800)
    assert found["batch"] == ["float32 [32, 2]", "int64 [32]"]
    assert found["loss_after"] < found["loss_before"]
    assert 0 < found["up_bytes"] < found["dense_bytes"]
    assert found["upload_s_at_mbit"]["1"] == pytest.approx(found["up_bytes"] * 8 / 1e6)
    said = thinwire("task", "check", mine / "task.py", "--plan", mine / "plan.toml")
    plan, module = mine / "plan.toml", mine / "task.py"
    assert said.err.endswith(f"next: thinwire sim {plan} --clients 4\n")
    assert "4482 trained parameters" in said.out
    assert f"next: thinwire sim PLAN --clients 4 --task task={module}" in thinwire("task", "check", module).err
    elsewhere = module.rename(mine / "elsewhere.py")
    said = thinwire("task", "check", elsewhere, "--plan", plan)
    assert said.err.endswith(f"next: thinwire sim {plan} --clients 4 --task mine={elsewhere}\n")


def test_the_next_step_is_one_command_in_the_readme_in_init_and_in_check(thinwire, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    next_step = "thinwire sim mine/plan.toml --clients 4"
    assert f"  {next_step}\n" in thinwire("init", "mine").err
    assert f"next: {next_step}\n" in thinwire("task", "check", "mine/task.py", "--plan", "mine/plan.toml").err
    assert f"\n{next_step}\n" in (ROOT / "README.md").read_text()
    assert f"\n{next_step}\n" in (ROOT / "docs/start/your-own-model.md").read_text()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def loss(model, batch): raise ValueError('private')", "ValueError at broken.py:2"),
        ("def loss(model, batch): return model(batch[0]).sum() * float('nan')", "nan on an untrained model"),
        ("def loss(model, batch): return model(batch[0])", "gave a tensor of shape"),
        ("def loss(model, batch): return torch.zeros(())", "does not depend on the model's parameters"),
        ("def model(): return 3", "gave an int"),
        ("def model(): raise KeyError('x')", "KeyError at broken.py:2"),
        ("def data(client): return open('/nowhere')", "FileNotFoundError at broken.py:2"),
        ("def data(client): return 5", "data(client) gave an int"),
        ("def metrics(model, batch): return 5", "gave an int"),
        (OTHER_EACH_TIME, "model() gives other tensors each time"),
        (CHANGES_WHAT_IS_FROZEN, "frozen tensor 0.weight was changed by training"),
        ("import nowhere_at_all", "cannot import the task"),
        ("del loss", "it has no loss"),
        ("def loss(:", "SyntaxError at broken.py:2"),
    ],
)
def test_check_says_what_is_wrong_with_a_task(thinwire, mine, code, said):
    answer = thinwire("task", "check", broken(mine, code=code), "--plan", mine / "plan.toml")
    assert answer.code == 3
    assert said in answer.err
    assert answer.err.startswith("error: ")


def test_a_simulation_shows_what_the_task_raised_and_stores_its_class_and_place_alone(thinwire, mine, home):
    module = broken(mine, code="def loss(model, batch): raise ValueError('row 7\\nis empty')")
    words = ("--task", f"mine={module}", "--clients", 2, "--set", "cohort.retry_limit=0")
    said = thinwire("sim", mine / "plan.toml", *words, "--home", home)
    assert said.code == 6
    lines = said.err.splitlines()
    at = next(number for number, line in enumerate(lines) if "task-error: ValueError at broken.py:2" in line)
    assert lines[at + 1 : at + 3] == ["    ValueError: row 7", "    is empty"]
    assert said.err.count("row 7") == 1, "of two clients that raised the same at the same place"
    assert "row 7" not in thinwire("runs", "show", "latest", "--json", "--home", home).out


def test_a_task_that_no_plan_names_is_called_as_its_file(thinwire, mine):
    said = thinwire("task", "check", broken(mine, code="def model(): return 3"))
    assert "model() of the task broken gave an int" in said.err


@pytest.mark.parametrize("command", ["check", "sim"])
def test_a_rule_for_tensors_that_the_model_does_not_have_is_refused_with_their_names(thinwire, mine, home, command):
    plan = mine / "plan.toml"
    plan.write_text(plan.read_text() + '\n[uplink.layers]\n"*.bais" = "fp16"\n')
    check, sim = ("task", "check", mine / "task.py", "--plan", plan), ("sim", plan, "--clients", 2, "--home", home)
    said = thinwire(*(check if command == "check" else sim))
    assert said.code == 3
    assert 'the rule "*.bais"=fp16 is for nothing' in said.err
    assert "there are 0.weight, 0.bias, " in said.err


@pytest.mark.parametrize("more", [(), ("--seeds", 2)], ids=["one run", "a sweep"])
def test_a_name_that_only_set_gives_is_not_that_of_the_code_beside_the_plan(thinwire, mine, home, more):
    said = thinwire("sim", mine / "plan.toml", "--set", "run.task=nope", "--home", home, *more)
    assert (said.code, said.out) == (3, "")
    assert said.err == (
        "error: no code for the task 'nope'\n"
        f"why:   no --task, {mine / 'task.py'} is that of 'mine', which the plan names, no installed entry point "
        "thinwire.tasks:nope\n"
        "try:   --task nope=path/to/task.py; or the task 'mine'\n"
    )


@pytest.mark.parametrize("more", [(), ("--seeds", 2)], ids=["one run", "a sweep"])
def test_a_split_that_cannot_be_is_refused_and_no_run_is_kept(thinwire, mine, home, more):
    said = thinwire("sim", mine / "plan.toml", "--clients", 2, "--split", "dirichlet(-1)", "--home", home, *more)
    assert said.code == 2
    assert said.err.startswith("error: no split 'dirichlet(-1)'\nwhy:   known: iid, dirichlet(ALPHA)")
    assert not (home / "aggregator").exists()


def test_simulated_taken_and_loaded_without_us_the_model_gives_the_recorded_metric(thinwire, mine, home, tmp_path):
    done = thinwire("sim", mine / "plan.toml", "--clients", 2, "--set", "run.rounds=2", "--json", "--home", home)
    assert done.code == 0
    assert (done.document["status"], done.document["source"], len(done.document["rounds"])) == ("done", "sim", 2)
    shown = thinwire("runs", "show", "--home", home).out
    assert re.search(r"of it evaluated the last model, and is in no round$", shown, re.MULTILINE)
    assert done.document["rounds"][0]["wire_bytes"] is None
    out = tmp_path / "model.safetensors"
    found = thinwire("runs", "model", "latest", "--out", out, "--json", "--home", home).document
    measured = json.loads(subprocess.run(
        [sys.executable, "-c", MEASURE, str(mine), str(out)], capture_output=True, text=True, check=True
    ).stdout)  # fmt: skip
    assert measured == pytest.approx(found["metrics"]["accuracy"], abs=1e-6)
    assert json.loads(measured_metadata(out)["metrics"]) == found["metrics"]
    again = thinwire("sim", mine / "plan.toml", "--clients", 2, "--set", "run.rounds=1", "--home", home, "--json",
                     "--set", f"run.init={out}")  # fmt: skip
    assert again.code == 0
    assert again.document["rounds"][0]["metrics"]["loss"] < done.document["rounds"][0]["metrics"]["loss"]


MEASURE = """
import sys, torch
from safetensors.torch import load_file
sys.path.insert(0, sys.argv[1])
from task import data, model
from thinwire.client import ClientInfo  # the data's two parts, as the simulation cut them
net = model()
net.load_state_dict(load_file(sys.argv[2]))
right = count = 0
for part in range(2):
    inputs, targets = data(ClientInfo(partition=part, partitions=2)).test.tensors
    right += int((net(inputs).argmax(1) == targets).sum())
    count += len(targets)
print(right / count)
"""


def measured_metadata(path):
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return file.metadata()


def test_extra_state_of_a_module_is_warned_of(thinwire, mine, home):
    code = """
        class Extra(nn.Linear):
            def get_extra_state(self): return {"seen": 1}
            def set_extra_state(self, state): pass
        def model(): return nn.Sequential(Extra(2, 2))
    """
    path, said = broken(mine, code=code), "get_extra_state() does not travel and is not in the exported model: 0"
    checked = thinwire("task", "check", path, "--plan", mine / "plan.toml")
    assert (checked.code, f"not sent   {said}" in checked.out) == (0, True)
    words = [mine / "plan.toml", "--task", f"mine={path}", "--home", home]
    begun = thinwire("sim", *words, "--clients", 2, "--set", "run.rounds=1")
    assert (begun.code, f"warning: {said}" in begun.err) == (0, True)
    with hold(AggregatorHome.under(home).lock, {"listen": "127.0.0.1:9"}):
        assert f"warning: {said}" in thinwire("run", *words, "--detach").err
    with pytest.warns(UserWarning, match="get_extra_state"):
        simulate(f"mine={path}", {"run": {"task": "mine", "rounds": 1}, "local": {"lr": 0.1, "steps": 1}}, clients=2)


def test_a_failing_task_is_a_failed_client_and_with_debug_an_exception(thinwire, mine, home):
    path = broken(mine, code="def loss(model, batch): raise ValueError('private')")
    words = ["sim", mine / "plan.toml", "--task", f"mine={path}", "--clients", 2, "--home", home, "--json"]
    said = thinwire(*words)
    assert (said.code, said.document["status"]) == (6, "failed")
    said = thinwire(*words, "--debug")
    assert (said.code, said.document["status"]) == (3, "failed")
    assert "raise ValueError('private')" in said.err


def test_a_run_that_is_handed_over_says_how_to_watch_it_in_this_home(thinwire, mine, home):
    Store.open(AggregatorHome.under(home).database).close()
    with hold(AggregatorHome.under(home).lock, {"listen": "127.0.0.1:9"}):
        said = thinwire("run", mine / "plan.toml", "--detach", "--home", home)
    assert (said.code, said.out) == (0, "mine-1\n")
    add = f"thinwire client start --aggregator http://127.0.0.1:9 --task mine=MODULE --name NAME --home {home}"
    assert said.err.splitlines() == [
        f"no device has joined yet; to add one: {add}", f"watch it: thinwire runs watch mine-1 --home {home}",
    ]  # fmt: skip


def test_a_run_begins_with_the_model_of_another_one(thinwire, mine, home):
    words = ["sim", mine / "plan.toml", "--clients", 2, "--home", home, "--json"]
    first = thinwire(*words, "--set", "run.rounds=2").document
    second = thinwire(*words, "--set", "run.rounds=1", "--set", f"run.init=run:{first['run_id']}").document
    assert second["rounds"][0]["metrics"]["loss"] < first["rounds"][0]["metrics"]["loss"]
    assert thinwire(*words, "--set", "run.init=run:nope").code == 9
    assert thinwire(*words, "--set", "run.init=nope.safetensors").code == 8


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_run_begins_with_a_file_of_any_float_type_exactly(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    layout = Layout.build([Tensor("w", (3, 2)), Tensor("b", (2,)), Tensor("mean", (2,), role="buffer")])
    values = {t.name: torch.randn(t.shape).to(getattr(torch, dtype)) for t in layout.tensors}
    save_file(values, tmp_path / "model.safetensors")
    params, buffers, _ = read_model_file(tmp_path / "model.safetensors", layout, np.zeros(2, np.float32))
    wanted = {name: value.to(torch.float32).reshape(-1).numpy() for name, value in values.items()}
    assert params.tobytes() == np.concatenate([wanted[t.name] for t in layout.trained]).tobytes()
    assert buffers.tobytes() == wanted["mean"].tobytes()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("torch.ones(2).to(torch.float8_e4m3fn)", "has the tensor b as F8_E4M3, and the model has it as float32"),
        ("torch.ones(2, dtype=torch.int8)", "has the tensor b as I8"),
        ("torch.ones(2, dtype=torch.bool)", "has the tensor b as BOOL"),
        ("torch.tensor([1.0, float('inf')]).bfloat16()", "holds NaN or infinity"),
        ("torch.tensor([1.0, 1e300], dtype=torch.float64)", "holds NaN or infinity"),
        ("torch.ones(3).bfloat16()", "is not a model of this task"),
    ],
)
def test_a_file_whose_values_would_be_falsified_is_refused_with_the_tensors_name(tmp_path, value, said):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    layout = Layout.build([Tensor("w", (2,)), Tensor("b", (2,))])
    save_file({"w": torch.zeros(2), "b": eval(value)}, tmp_path / "model.safetensors")
    with pytest.raises(TaskError) as refused:
        read_model_file(tmp_path / "model.safetensors", layout, np.zeros(0, np.float32))
    assert said in refused.value.what
    assert refused.value.why
    assert refused.value.hint


def test_an_init_file_in_bfloat16_starts_a_simulation(thinwire, mine, home, tmp_path):
    from safetensors.torch import save_file

    save_file(
        load_task(f"mine={mine / 'task.py'}").module.model().bfloat16().state_dict(), tmp_path / "bf16.safetensors"
    )
    said = thinwire("sim", mine / "plan.toml", "--clients", 2, "--set", "run.rounds=1", "--home", home,
                    "--set", "run.init=bf16.safetensors")  # fmt: skip
    assert said.code == 0, said.err
