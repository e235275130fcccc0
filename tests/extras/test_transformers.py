"""Hugging Face models as tasks, with the real Trainer and peft: their examples, `task check`, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from thinwire.client import Context
from thinwire.client.adapters import transformers as adapter
from thinwire.client.task import as_task
from thinwire.client.train.context import TrainingControl
from thinwire.client.train.errors import BadTask
from thinwire.client.train.module import build
from thinwire.client.train.protocol import ClientInfo, Local
from thinwire.client.train.schedule import Schedule
from thinwire.core import RunPlan
from thinwire.simulation import simulate

ROOT = Path(__file__).parents[2]
LORA = ROOT / "examples" / "lora"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages: they warn of each other
EXAMPLES: Any = [
    {"input_ids": torch.arange(6) % (2 + i % 2), "labels": torch.tensor(i % 2), "index": i} for i in range(40)
]


def run(program: list[str], folder: Path) -> str:
    """Run a program of the example in a folder, with the checkpoint that lies there; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "THINWIRE_HOME": str(folder / "home")}
    ended = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def small() -> BertForSequenceClassification:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=8, max_position_embeddings=8, **sizes))


def adapted(arguments: Any = None, data: Any = EXAMPLES, **more: Any) -> Any:
    return adapter.task(small, lambda client: data, arguments, **more)


def trained(task: Any, context: Context) -> tuple[Any, int]:
    module = build(as_task("small", task))
    return module, task.train(module, task.data(ClientInfo()).train, context)


def test_fine_tuning_with_the_trainer_passes_task_check(tmp_path: Path) -> None:
    example = ROOT / "examples" / "hf_classifier"
    said = run(
        ["-m", "thinwire.cli", "task", "check", f"{example}/task.py", "--plan", f"{example}/plan.toml"], tmp_path
    )
    before, after = map(float, re.findall(r"loss +([\d.]+) before one step, ([\d.]+) after it", said)[0])
    assert after < before
    assert "of train()" in said
    assert list(tmp_path.iterdir()) == [], "the Trainer wrote no checkpoint"


def test_fine_tuning_reaches_its_accuracy_in_a_simulation() -> None:
    example = ROOT / "examples" / "hf_classifier"
    found = simulate(f"hf_classifier={example / 'task.py'}", RunPlan.load(example / "plan.toml"), clients=4)
    assert found.run.status == "done"
    assert found.metrics["accuracy"] > 0.6  # four packages: chance is 0.25


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the LoRA example, in bf16."""
    folder = tmp_path_factory.mktemp("lora")
    assert "step 80 of 80" in run([f"{LORA}/make_base.py", "base"], folder)
    return folder / "base"


def test_lora_starts_from_a_checkpoint_in_bf16_and_is_merged_into_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_BASE", str(base))
    plan, home = RunPlan.load(LORA / "plan.toml"), tmp_path / "home"
    found = simulate(f"lora={LORA / 'task.py'}", plan, clients=3, home=home)
    kinds = {(p.dtype, p.requires_grad) for p in found.model().parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    assert found.rounds[-1].metrics["loss"] < found.rounds[0].metrics["loss"]
    said = run(["-m", "thinwire.cli", "runs", "model", "latest", "--out", "model.safetensors"], tmp_path)
    assert "28 tensors" in said
    assert "21 frozen" in said
    said = run([f"{LORA}/merge.py", "model.safetensors", "merged"], tmp_path)
    before, after = (float(loss) for loss in re.findall(r"torch.bfloat16, loss ([\d.]+)", said))
    assert after < before - 0.1


def test_the_plan_decides_rate_steps_and_batch_and_the_arguments_the_rest() -> None:
    seen: list[Any] = []

    class Recorded(Trainer):  # type: ignore[misc]  # mypy does not see the package
        def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            seen.append((len(inputs["labels"]), self.optimizer.param_groups[0]["lr"], sorted(inputs)))
            return super().training_step(model, inputs, *more, **named)

    arguments = TrainingArguments(gradient_accumulation_steps=2, optim="sgd")
    context = Context(Local(lr=0.25, epochs=2.0, batch=4))
    _, weight = trained(adapted(arguments, trainer=Recorded), context)
    assert (weight, context.done, context.total) == (40, 10, 10)
    assert seen == [(4, 0.25, ["input_ids", "labels"])] * 20
    total, count = context.metrics["loss"]
    assert count == 80
    assert 0 < total / count < 2


def test_a_step_has_the_rate_of_its_middle() -> None:
    seen: list[float] = []

    class Recorded(Trainer):  # type: ignore[misc]  # mypy does not see the package
        def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            seen.append(self.optimizer.param_groups[0]["lr"])
            return super().training_step(model, inputs, *more, **named)

    schedule = Schedule(warmup=1.0, begin=0.0, until=0.5)
    context = Context(Local(lr=0.25, steps=4, batch=4), control=TrainingControl(schedule))
    trained(adapted(trainer=Recorded), context)
    assert seen == pytest.approx([0.25 * schedule.factor(step, 4) for step in range(4)])


def test_a_training_without_time_ends_early_and_weighs_less() -> None:
    class Late(Context):
        def should_stop(self) -> bool:
            return self.done >= 3

    context = Late(Local(lr=0.1, steps=6, batch=8), may_report=False)
    assert trained(adapted(), context)[1] == 20
    assert context.done == 3


def test_two_trainings_with_one_seed_give_the_same_bits_and_with_another_one_others() -> None:
    def bits(seed: int) -> torch.Tensor:
        module = build(as_task("small", adapted()))
        torch.manual_seed(seed)
        adapted().train(module, adapted().data(ClientInfo()).train, Context(Local(lr=0.01, steps=3, batch=8)))
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert torch.equal(bits(1), bits(1))
    assert not torch.equal(bits(1), bits(2))


def test_compute_metrics_of_a_trainer_sees_the_whole_test_split() -> None:
    def compute(prediction: Any) -> dict[str, Any]:
        right = prediction.predictions.argmax(1) == prediction.label_ids
        return {"accuracy": right.mean(), "examples": len(right)}

    task, net = adapted(), small().eval()
    loader = task.data(ClientInfo()).train
    with torch.no_grad():
        found = adapter.evaluator(compute)(net, loader)
        batches = [task.metrics(net, batch)["accuracy"][0] for batch in loader]
    assert found == {"accuracy": pytest.approx(sum(batches) / 40), "examples": 40.0}


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ({"learning_rate": 3e-5}, "learning_rate", "[local] lr"),
        ({"num_train_epochs": 1.0}, "num_train_epochs", "[local] epochs"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type", "[local] schedule"),
    ],
    ids=str,
)
def test_an_argument_that_the_plan_decides_is_refused(arguments: Any, what: str, hint: str) -> None:
    with pytest.raises(BadTask, match=what) as refused:
        adapted(TrainingArguments(**arguments))
    assert hint in refused.value.hint


def test_data_without_labels_and_a_loader_are_refused() -> None:
    task = adapted(data=[{"input_ids": torch.arange(6)}] * 4)
    with pytest.raises(BadTask, match="without a loss"):
        task.loss(small(), next(iter(task.data(ClientInfo()).train)))
    with pytest.raises(BadTask, match="gave a DataLoader"):
        adapted(data=DataLoader(EXAMPLES)).data(ClientInfo())
