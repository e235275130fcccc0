"""The baseline: the same model, the same examples and the same number of steps, with all data in one place.

python examples/digits/centralised.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo
from thinwire.client.task import load_task
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
    infos = [ClientInfo(partition=i, partitions=clients, split=split, seed=plan.run.seed) for i in range(clients)]
    splits = [task.module.data(info) for info in infos]
    train, test = (pooled([getattr(one, name) for one in splits]) for name in ("train", "test"))
    module = build(task, derive(Key(plan.run.seed), "init"))
    steps = plan.run.rounds * (plan.local.steps if isinstance(plan.local.steps, int) else 1)
    trainer = TorchTrainer(task, Local.of(plan.local.model_dump()))
    trainer.train(module, train, Work(steps, plan.local.batch), derive(Key(plan.run.seed), "centralised"))
    return {name: total / count for name, (total, count) in evaluate(module, task, test).items()}


def pooled(parts: list[TensorDataset]) -> TensorDataset:
    return TensorDataset(*(torch.cat(tensors) for tensors in zip(*(part.tensors for part in parts), strict=True)))


if __name__ == "__main__":
    print(centralised(RunPlan.load(HERE / "plan.toml"), clients=8, split="dirichlet(0.3)"))
