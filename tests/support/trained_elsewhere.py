"""A task in a file, whose loss does what a test wishes, and a worker that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.small_task import Aggregator, plan_of
from thinwire.client import load_task
from thinwire.client.executor import Worker
from thinwire.client.handler import AssignmentHandler
from thinwire.client.train.protocol import ClientInfo
from thinwire.client.worker_process import Interpreter
from thinwire.core.statedir import private_folder

TASK = '''
"""A small classifier with a normed layer."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import Split

WISH = Path(__file__).with_name("wish")


def model():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


def data(client):
    draw = torch.Generator().manual_seed(3 + client.partition)
    inputs = torch.randn(24, 4, generator=draw)
    both = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return Split(both, both)


def loss(model, batch):
    wish = WISH.read_text() if WISH.exists() else ""
    exec(wish)
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)
'''


class Elsewhere:
    """A device whose task is worked on in another process, and the aggregator that sends it assignments."""

    def __init__(self, folder: Path, plan: Any = None, **options: Any) -> None:
        self.folder = private_folder(folder / "client")
        self.file = folder / "task.py"
        if not self.file.exists():
            self.file.write_text(TASK)
        self.spec = f"small={self.file}"
        python = options.pop("python", None)
        self.worker = Worker([self.spec], Interpreter(python, self.folder), device="cpu", **options)
        self.aggregator = Aggregator(folder / "assignments", load_task(self.spec), plan or plan_of(codec="int8"))
        self.said: list[str] = []

    def handler(self, home: Path | None = None) -> AssignmentHandler:
        (executor,) = self.worker.executors()
        return AssignmentHandler(executor, home or self.folder, ClientInfo("pi-01"))

    def answer(self, handler: AssignmentHandler, number: int, cancelled: Any = lambda: False, **changed: Any) -> Any:
        return handler.handle(self.aggregator.assign(number, **changed), cancelled, self.said.append)[0]

    def wish(self, code: str = "") -> None:
        self.file.with_name("wish").write_text(code)

    def begun(self, code: str = "") -> Path:
        """The file that is there from the first loss on; then `code`."""
        path = self.file.with_name("begun")
        path.unlink(missing_ok=True)
        self.wish(f"Path({str(path)!r}).touch(){code}")
        return path

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text()
