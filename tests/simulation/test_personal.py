"""Personal layers in a simulation: what is shared is what FedAvg shares, and the rest stays with its client."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.small_task import plan_of, task_of
from thinwire.aggregation import codecs
from thinwire.cli.main import main
from thinwire.client.train.protocol import ClientInfo, Split
from thinwire.core import RunPlan
from thinwire.core.errors import NotFound, PlanError
from thinwire.core.events import Evaluated
from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.layout import Layout
from thinwire.core.personal_layers import shared_layout
from thinwire.core.statedir import AggregatorHome
from thinwire.server.policy.eligibility import mismatch
from thinwire.server.run_deletion import delete_run
from thinwire.simulation import History, simulate
from thinwire.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "personal"
FEDPER = 'personal_layers = ["1.*"]'
IN_A_FILE = """
from tests.simulation.test_personal import accuracy, contrary, level
from tests.support.small_task import cross_entropy as loss
model, data, metrics = level, contrary, accuracy
"""


def level() -> nn.Module:
    """A body that a seed draws, and a constant head: the same one in every run and on every client."""
    head = nn.Linear(5, 3)
    nn.init.constant_(head.weight, 0.1)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Linear(4, 5), head)


def contrary(client: Any) -> Split:
    """Data whose labels mean the opposite on every other client, so that no shared head fits all."""
    draw = torch.Generator().manual_seed(client.partition)
    inputs = torch.randn(60, 4, generator=draw)
    labels = ((inputs.sum(1) > 0) ^ (client.partition % 2 == 1)).long()
    both = TensorDataset(inputs, labels)
    return Split(both, both)


def simulated(local: str = "", rounds: int = 1, more: str = "", **options: Any) -> History:
    plan = plan_of(f"steps = 8\n{local}", run=f"rounds = {rounds}\nseed = 2\n{more}")
    return simulate(task_of(level, data=contrary, metrics=accuracy), plan, clients=4, **options)


def accuracy(model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
    inputs, targets = batch
    return {"accuracy": (float((model(inputs).argmax(1) == targets).sum()), len(targets))}


def shared(history: History) -> dict[str, Any]:
    return {name: values.tolist() for name, values in history.model().state_dict().items() if name.startswith("0.")}


def worst(history: History) -> float:
    last = max(row["round"] for row in history.client_records())
    return min(float(row["eval/accuracy"]) for row in history.client_records() if row["round"] == last)


def test_the_shared_layers_of_the_first_round_have_the_bits_of_a_run_that_sums_the_head_too() -> None:
    one, other = simulated(FEDPER), simulated()
    assert shared(one) == shared(other)
    assert other.run.payload_up - one.run.payload_up == 4 * 4 * 18, "four clients send 18 floats less"
    assert shared(simulated(FEDPER, 2)) != shared(simulated(rounds=2)), "the heads differ from then on"


def test_each_client_has_a_head_of_its_own_and_every_one_gains() -> None:
    personal, common = simulated(FEDPER, 8), simulated(rounds=8)
    assert worst(personal) > worst(common) + 0.2
    assert personal.metrics["personal"] == 1.0
    assert "personal" not in common.metrics


def right(model: nn.Module, part: int) -> int:
    inputs, labels = contrary(ClientInfo(partition=part)).test.tensors
    return int((model(inputs).argmax(1) == labels).sum())


def test_a_home_keeps_the_whole_model_of_each_client(tmp_path: Path) -> None:
    """The last model was evaluated with each client's own layers: its accuracy is that of the whole models."""
    history = simulated(FEDPER, 4, home=tmp_path)
    whole = [history.model(f"sim-{part}") for part in range(4)]
    assert sum(right(model, part) for part, model in enumerate(whole)) / 240 == history.metrics["accuracy"]
    assert sum(right(model, 1 - part) for part, model in enumerate(whole[:2])) < 60, "the other one's labels"
    for one, client in ((history, "sim-4"), (simulated(FEDPER), "sim-0")):
        with pytest.raises(NotFound, match=f"keeps no personal layers of '{client}'"):
            one.model(client)
    home = AggregatorHome.under(tmp_path)
    kept = sorted(path.name for path in (home.root / "simulated" / "small-1").rglob("*") if path.is_file())
    assert kept == ["simulation.json", *["small-1.safetensors"] * 4]
    with Store.open(home.database) as store:
        delete_run(store, home, "small-1", "ann")
    assert not (home.root / "simulated" / "small-1").exists()


def test_a_run_that_begins_with_the_model_of_a_kept_one_begins_with_its_clients_layers(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(IN_A_FILE)
    (tmp_path / "plan.toml").write_text(f'[run]\ntask = "small"\nrounds = 1\n[local]\nlr = 0.1\nsteps = 2\n{FEDPER}\n')

    def shares(*more: str) -> list[float]:
        words = ["sim", str(tmp_path / "plan.toml"), "--task", f"small={file}", "--keep", "--home", str(tmp_path)]
        assert main([*words, *more]) == 0
        with Store.open(AggregatorHome.under(tmp_path).database) as store:
            run = store.run("latest").run_id
            return [e.metrics["personal"] for _, e in store.events(run) if isinstance(e, Evaluated)]

    four, after = ("--clients", "4"), ("--set", "run.init=run:small-1")
    assert shares(*four) == [0.0, 1.0]
    assert shares(*four, *after) == [1.0, 1.0]
    assert shares("--clients", "3", *after) == [0.0, 1.0], "the clients have other data"
    assert shares(*four, "--set", "run.init=run:small-1@0") == [0.0, 1.0]


def test_the_head_of_a_model_without_personal_layers_is_that_of_the_task() -> None:
    head = simulated(FEDPER).model().state_dict()
    assert torch.equal(head["1.weight"], level().state_dict()["1.weight"])


@pytest.mark.parametrize("cohort", ["", '[cohort]\nmode = "buffered"\nbuffer = 2'], ids=["sync", "buffered"])
def test_the_same_bits_in_several_processes(tmp_path: Any, cohort: str) -> None:
    file = tmp_path / "task.py"
    file.write_text(IN_A_FILE)
    plan = plan_of(f"steps = 3\n{FEDPER}", run=f"rounds = 3\nseed = 2\n{cohort}")
    one, two = (simulate(f"small={file}", plan, clients=4, processes=count) for count in (1, 2))
    assert shared(one) == shared(two)
    assert [row.metrics for row in one.rounds] == [row.metrics for row in two.rounds]
    assert one.metrics == two.metrics, "no client has trained for an assignment that was withdrawn"


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_a_control_variate_covers_the_shared_coordinates(algorithm: str) -> None:
    history = simulated(f'{FEDPER}\n[cohort]\nlate = "drop"', 3, f'algorithm = "{algorithm}"')
    assert history.metrics["personal"] == 1.0
    assert [row.reason for row in history.rounds] == ["all"] * 3


def test_what_cannot_hold_is_refused_before_a_run() -> None:
    with pytest.raises(PlanError, match="matches every trained tensor"):
        simulated('personal_layers = ["*"]')
    with pytest.raises(PlanError, match="matches no tensor"):
        simulated('personal_layers = ["head.*"]')
    private = '[privacy]\nmode = "example"'
    found = [refusal.what for refusal in plan_of(f"{FEDPER}\n{private}").check(codecs)]
    assert '[privacy] mode = "example" with [local] personal_layers' in found


def test_the_example_gains_for_its_worst_client() -> None:
    plan = RunPlan.load(EXAMPLE / "plan.toml", {"run.rounds": "5"}).to_json()
    shares = {**plan, "local": {**plan["local"], "personal_layers": []}}
    task = f"digits={EXAMPLE / 'task.py'}"
    own, common = (simulate(task, one, clients=8, split="dirichlet(0.1)") for one in (plan, shares))
    assert worst(own) >= worst(common) + 0.05


DROP = '[cohort]\nclients = 4\nlate = "drop"\ndeadline_s = 60\n'
PRIVATE = '[privacy]\nmode = "{}"\nclip = 1.0\nnoise_multiplier = 0.1\ndelta = 1e-3\n'
COVERED = {
    "secure": "[secure]\nenabled = true\nmax_dropout = 0.25\nmax_corrupt = 0.25\n",
    "central": PRIVATE.format("central"),
    "local": PRIVATE.format("local"),
}


@pytest.mark.parametrize("what", COVERED)
def test_masks_and_noise_cover_the_shared_coordinates(what: str) -> None:
    local = {"lr": 0.1, "steps": 4, "personal_layers": ["1.*"], "buffers": "local"}
    plan = {"run": {"task": "small", "rounds": 2, "evaluate": "off"}, "local": local}
    text = tomllib.loads(DROP + COVERED[what])
    history = simulate(task_of(level, data=contrary), RunPlan.from_json({**plan, **text}), clients=4)
    assert [row.reason for row in history.rounds] == ["all"] * 2
    assert shared(history) != shared(simulated())


def test_a_device_gives_the_first_model_without_its_head() -> None:
    assert simulated(FEDPER, 2, 'init = "device"').metrics["personal"] == 1.0


def test_devices_with_other_heads_fit_and_those_with_another_body_do_not() -> None:
    own = Layout.of({"body": (2,), "head": (3,)})
    plan, run = plan_of('personal_layers = ["head"]'), shared_layout(own, ("head",))

    def reason(**shapes: tuple[int, ...]) -> str:
        layout = Layout.of(shapes)
        report = TaskReport("small", layout_digest=layout.digest, tensors=layout.text)
        wanted = TaskReport("small", layout_digest=own.digest)
        return mismatch(plan, wanted, Hello("pi-01", "pi-01", (report,), {}), run)

    assert reason(body=(2,), head=(3,)) == reason(body=(2,), head=(5,)) == ""
    assert "body is 4 instead of 2" in reason(body=(4,), head=(3,))
    assert "matches no tensor" in reason(body=(2,))
