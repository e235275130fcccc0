"""The baseline: the same model, the same examples and the same number of steps, with all data in one place.

python examples/digits/centralised.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo
from thinwire.client.task import LoadedTask, load_task
from thinwire.client.train.evaluate import evaluate
from thinwire.client.train.layout import Key, derive
from thinwire.client.train.module import build
from thinwire.client.train.protocol import Local, Work
from thinwire.client.train.trainer import TorchTrainer
from thinwire.core import RunPlan

HERE = Path(__file__).parent


def centralised(plan: RunPlan, clients: int, split: str) -> dict[str, float]:
    """Accuracy and loss on the clients' pooled test splits, after training on their pooled train splits."""
    task = load_task(f"digits={HERE / 'task.py'}")
    train, test = (pooled_split(name, task, plan, clients, split) for name in ("train", "test"))
    module = build(task, derive(Key(plan.run.seed), "init"))
    steps = plan.run.rounds * (plan.local.steps if isinstance(plan.local.steps, int) else 1)
    trainer = TorchTrainer(task, Local.of(plan.local.model_dump()))
    trainer.train(module, train, Work(steps, plan.local.batch), derive(Key(plan.run.seed), "centralised"))
    return means(evaluate(module, task, test))


def measured(file: Path, plan: RunPlan, clients: int, split: str) -> dict[str, float]:
    """Accuracy and loss of the model of a .safetensors file on the clients' pooled test splits."""
    task = load_task(f"digits={HERE / 'task.py'}")
    module = build(task, derive(Key(plan.run.seed), "init"))
    module.load_state_dict(load_file(file))
    return means(evaluate(module, task, pooled_split("test", task, plan, clients, split)))


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items()}


def pooled_split(name: str, task: LoadedTask, plan: RunPlan, clients: int, split: str) -> TensorDataset:
    infos = [ClientInfo(partition=i, partitions=clients, split=split, seed=plan.run.seed) for i in range(clients)]
    return pooled([getattr(task.module.data(info), name) for info in infos])


def pooled(parts: list[TensorDataset]) -> TensorDataset:
    return TensorDataset(*(torch.cat(tensors) for tensors in zip(*(part.tensors for part in parts), strict=True)))


if __name__ == "__main__":
    print(centralised(RunPlan.load(HERE / "plan.toml"), clients=8, split="dirichlet(0.3)"))
