"""Small tasks, and assignments as an aggregator would send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.aggregation import write_model
from thinwire.client.admission import AdmissionController
from thinwire.client.assignment_context import HandlerEnvironment
from thinwire.client.handler import AssignmentHandler
from thinwire.client.task import Initial, LoadedTask, as_task, initial_model
from thinwire.client.train.protocol import ClientInfo, Local, Split
from thinwire.core import RunPlan
from thinwire.core.fleet import Delivery
from thinwire.core.statedir import private_folder
from thinwire.core.types import Assignment, UpdateId, UpdateOutcome, Work

RUN = "small-1"


def examples(count: int = 24, seed: int = 3) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=draw)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def task_of(model: Callable[[], Any] = linear, **functions: Any) -> LoadedTask:
    """A task whose data are 24 examples to train on and 6 to be measured on."""
    usual = {"model": model, "data": lambda client: Split(examples(), examples(6, 4)), "loss": cross_entropy}
    return as_task("small", SimpleNamespace(**{**usual, **functions}))


def plan_of(text: str = "", codec: str = "identity", feedback: str = "none", run: str = "") -> RunPlan:
    uplink = f'[uplink]\ncodec = "{codec}"\nfeedback = "{feedback}"'
    return RunPlan.parse(f'[run]\ntask = "small"\n{run}\n[local]\nlr = 0.1\nbatch = 8\n{text}\n{uplink}')


def local_of(plan: RunPlan) -> Local:
    return Local.of(plan.local.model_dump(mode="json"))


class Aggregator:
    """The other end of one handler: assignments with the model of its choice, and keeps nothing of the answers."""

    def __init__(self, folder: Path, task: LoadedTask, plan: RunPlan, steps: int = 3) -> None:
        self.folder, self.task, self.plan, self.steps = folder, task, plan, steps
        self.first: Initial = initial_model(task, 0, plan.local.personal_layers)
        self.said: list[str] = []

    def handler(
        self, home: Path | None = None, admission: AdmissionController | None = None, **environment: Any
    ) -> AssignmentHandler:
        """The device as a new process would find it; `environment` are fields of a `HandlerEnvironment`."""
        folder, around = private_folder(home or self.folder / "device"), HandlerEnvironment(**environment)
        return AssignmentHandler(self.task, folder, ClientInfo("pi-01"), admission, environment=around)

    def assign(
        self,
        round_number: int = 1,
        kind: Any = "train",
        outcomes: Sequence[tuple[int, Any]] = (),
        params: np.ndarray | None = None,
        **changed: Any,
    ) -> Delivery:
        self.folder.mkdir(exist_ok=True)
        bundle = self.folder / f"v{round_number}.model"
        layout = self.first.layout
        parts, digest = write_model(bundle, layout, self.first.vector if params is None else params, self.first.buffers)
        fields: dict[str, Any] = {
            "assignment_id": f"a-{round_number}", "run": RUN, "task": "small", "kind": kind,
            "plan": self.plan.to_json(),
            "round": round_number, "base_version": round_number - 1, "base_digest": digest,
            "layout_digest": layout.digest, "codec": self.plan.uplink.codec,
            "work": Work(self.steps, self.plan.local.batch), "parts": tuple(parts),
            "outcomes": tuple(UpdateOutcome(UpdateId(RUN, "pi-01", n), told, round_number - 1) for n, told in outcomes),
        }  # fmt: skip
        return Delivery(Assignment(**{**fields, **changed}), bundle)

    def answer(self, handler: AssignmentHandler, delivery: Delivery) -> Any:
        return handler.handle(delivery, lambda: False, self.said.append)
