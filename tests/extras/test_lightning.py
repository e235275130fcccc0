"""A LightningModule as a task, with the real Lightning: its example, the plan's rate and steps, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.client import Context
from thinwire.client.adapters import lightning as adapter
from thinwire.client.task import as_task
from thinwire.client.train.context import TrainingControl
from thinwire.client.train.errors import BadTask
from thinwire.client.train.module import build
from thinwire.client.train.protocol import ClientInfo, Local
from thinwire.client.train.schedule import Schedule
from thinwire.core import RunPlan
from thinwire.simulation import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages: they warn of each other
INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
EXAMPLES = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


class Net(lightning.LightningModule):  # type: ignore[misc]  # mypy does not see the package
    """A linear classifier whose layers learn at two rates."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.rates: list[list[float]] = []

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.log_dict({"train_loss": loss})
        return {"loss": loss}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self) -> Any:
        slow: Any = {"params": self.body.parameters(), "lr": 0.01}
        return torch.optim.SGD([{"params": self.head.parameters()}, slow], lr=0.1)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def adapted(net: Any = Net, data: Any = EXAMPLES, **trainer: Any) -> Any:
    return adapter.task(net, lambda client: data, trainer=trainer)


def trained(task: Any, context: Context) -> tuple[Any, int]:
    module = build(as_task("net", task))
    return module, task.train(module, task.data(ClientInfo()).train, context)


def test_the_example_reaches_its_accuracy_in_a_simulation() -> None:
    found = simulate(f"lightning_digits={EXAMPLE / 'task.py'}", RunPlan.load(EXAMPLE / "plan.toml"), clients=4)
    assert found.run.status == "done"
    assert found.metrics["accuracy"] > 0.85
    assert found.rounds[-1].metrics["loss"] < 0.5 * found.rounds[0].metrics["loss"]


def test_the_plan_decides_rate_and_steps_and_the_groups_keep_their_ratio() -> None:
    context = Context(Local(lr=0.5, epochs=2.0, batch=8))
    module, seen = trained(adapted(), context)
    assert seen == 40
    assert len(module.rates) == 10
    assert module.rates[0] == pytest.approx([0.5, 0.05])
    assert (context.done, context.total) == (10, 10)
    total, count = context.metrics["loss"]
    assert count == 80
    assert 0 < total / count < 2


def test_a_step_has_the_rate_of_its_middle() -> None:
    schedule = Schedule(warmup=1.0, begin=0.0, until=0.5)
    context = Context(Local(lr=0.5, steps=4, batch=8), control=TrainingControl(schedule))
    module, _ = trained(adapted(), context)
    assert [rates[0] for rates in module.rates] == pytest.approx([0.5 * schedule.factor(step, 4) for step in range(4)])


def test_a_loader_of_its_own_and_accumulated_gradients_make_the_steps_of_lightning() -> None:
    loader = DataLoader(EXAMPLES, batch_size=4, shuffle=True)
    module, _ = trained(adapted(data=loader, accumulate_grad_batches=2), Context(Local(lr=0.1, epochs=1.0)))
    assert len(module.rates) == 5
    with pytest.raises(BadTask, match="own batches"):
        trained(adapted(data=loader), Context(Local(lr=0.1, batch=8)))


def test_a_training_without_time_ends_early_and_weighs_less() -> None:
    class Late(Context):
        def should_stop(self) -> bool:
            return self.done >= 3

    module, seen = trained(adapted(), Late(Local(lr=0.1, steps=6, batch=8), may_report=False))
    assert (len(module.rates), seen) == (3, 20)


def test_metrics_without_a_validation_step_are_the_loss() -> None:
    task = adapted()
    module = build(as_task("net", task)).eval()
    assert task.metrics(module, EXAMPLES.tensors) == {
        "loss": (pytest.approx(40 * float(task.loss(module, EXAMPLES.tensors))), 40.0)
    }
    assert "log" not in vars(module)


@pytest.mark.parametrize(
    ("net", "what"), [(Scheduled, "scheduler"), (Manual, "automatic_optimization"), (lambda: nn.Linear(4, 2), "Linear")]
)
def test_a_module_that_decides_what_the_plan_decides_is_refused(net: Any, what: str) -> None:
    with pytest.raises(BadTask, match=what) as refused:
        trained(adapted(net), Context(Local(lr=0.1, steps=1)))
    assert refused.value.hint


def test_an_argument_of_the_trainer_that_has_no_effect_is_refused() -> None:
    with pytest.raises(BadTask, match="epochs of the plan"):
        adapted(max_epochs=3)
