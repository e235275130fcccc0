"""The baseline: the same model on the same text in one place, as many steps as one client makes and as many windows as
all of them do: its batch is that of all clients of a round together.

python examples/code_lm/centralised.py [--rounds N]
"""

from __future__ import annotations

import argparse
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
    """Accuracy and loss on the clients' pooled test windows, after training on their pooled train windows."""
    task = load_task(f"code_lm={HERE / 'task.py'}")
    infos = [ClientInfo(partition=i, partitions=clients, split=split, seed=plan.run.seed) for i in range(clients)]
    splits = [task.module.data(info) for info in infos]
    train, test = (
        TensorDataset(torch.cat([getattr(one, name).tensors[0] for one in splits])) for name in ("train", "test")
    )
    assigned = plan.cohort.clients if isinstance(plan.cohort.clients, int) else clients
    module = build(task, derive(Key(plan.run.seed), "init"))
    steps = plan.run.rounds * (plan.local.steps if isinstance(plan.local.steps, int) else 1)
    trainer = TorchTrainer(task, Local.of(plan.local.model_dump()))
    trainer.train(module, train, Work(steps, assigned * plan.local.batch), derive(Key(plan.run.seed), "centralised"))
    return {name: total / count for name, (total, count) in evaluate(module, task, test).items()}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="the baseline of examples/code_lm")
    options.add_argument("--rounds", type=int, default=20, help="as many steps as one client makes in these")
    plan = RunPlan.load(HERE / "plan.toml", {"run.rounds": str(options.parse_args().rounds)})
    print(centralised(plan, clients=64, split="by(package)"))
