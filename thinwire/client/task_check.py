"""Check a task before it runs: a few local steps, one encode and one aggregation, in this process.

`thinwire task check` calls `rehearse`.

Invariant: the task's functions get what a device gives them: the data of `data(client)`, in batches drawn as there. The
check is short because it assigns few steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thinwire.aggregation import WeightedMean
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.downlink import Downlink
from thinwire.aggregation.plan_codecs import require_rules, rungs
from thinwire.client import payload
from thinwire.client.errors import place
from thinwire.client.payload import ControlVariate, encode
from thinwire.client.policy import Policy
from thinwire.client.run_state import ClientRunState
from thinwire.client.task import Initial, initial_model, require_own_loop
from thinwire.client.train import data
from thinwire.client.train import module as tensors
from thinwire.client.train.context import Context
from thinwire.client.train.errors import TrainError, task_code
from thinwire.client.train.evaluate import BATCH, evaluate, names, numbers, whole_set
from thinwire.client.train.layout import Key, derive
from thinwire.client.train.module import build
from thinwire.client.train.protocol import Local, Work
from thinwire.client.train.runtime import TaskRuntime, require_same_layout
from thinwire.client.train.state import copied
from thinwire.client.train.trainer import TorchTrainer, Trained
from thinwire.compression import parse
from thinwire.core import prng
from thinwire.core.errors import PlanError, TaskError, ThinwireError
from thinwire.core.personal_layers import shared_model
from thinwire.core.score_histogram import names_of, own_values
from thinwire.core.statedir import MB
from thinwire.privacy.summed_metrics import may_report

if TYPE_CHECKING:
    from thinwire.client.train.protocol import ClientInfo
    from thinwire.client.train.task import LoadedTask
    from thinwire.core.layout import Layout
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Payload, Vector

STEPS = 3  # timed; the first one includes the setup of torch
KEY = Key(1)


@dataclass(frozen=True)
class TaskCheck:
    """The results of a check.

    Bytes are the payload of one round; `peak_bytes` is this process's memory at its highest. `own_train` is True if the
    task has its own train(): `step_s` is then the time of a call with `STEPS` steps, divided by them. `reported` are
    the metrics of that call, `train_steps` the steps made and all steps as it reported them, and `state` its arrays.
    `left_out` names the part of the model's state that is not sent. `counted_once` are metrics with a count of 1 over a
    batch of `measured` examples.
    """

    parameters: int
    tensors: int
    buffers: int
    frozen: int
    layout_digest: str
    train_examples: int | None
    test_examples: int | None
    batch: list[str]
    loss_before: float
    loss_after: float
    left_out: str
    own_train: bool
    reported: dict[str, float]
    train_steps: tuple[int, int]
    state: list[str]
    metrics: dict[str, float]
    counted_once: list[str]
    measured: int
    step_s: float
    peak_bytes: int
    codec: str
    up_bytes: int
    down_bytes: int
    dense_bytes: int


def metrics_of(task: LoadedTask, client: ClientInfo, plan: RunPlan) -> list[str] | None:
    """Return the names of a client's metrics, of its first batch and its whole set; None if the task's code raises."""
    try:
        with task_code():
            initial, runtime = initial_model(task, plan.run.seed), TaskRuntime(task)
            test = runtime.split(client).test
            batch = next(iter(data.in_order(test, plan.local.batch)))
            module = runtime.set_up(initial.vector, initial.buffers, initial.counters)
            whole, histograms = whole_set(module, task, test, {})
            return sorted({*names(module, task, batch), *whole, *names_of(histograms)})
    except Exception:  # any error of the task's code: the client that runs it reports it
        return None


def rehearse(task: LoadedTask, client: ClientInfo, plan: RunPlan) -> TaskCheck:
    """Check the task; `TaskError` names the fault and its line in the task's code."""
    require_own_loop(plan, task)
    shared = initial_model(task, plan.run.seed, plan.local.personal_layers)
    require_rules(plan, travels_of(plan, shared.layout))
    initial = initial_model(task, plan.run.seed)
    try:
        runtime = TaskRuntime(task)
        require_same_layout(runtime.layout, tensors.layout_of(build(task)))
        with task_code():
            return _rehearse(runtime, client, plan, initial)
    except (ThinwireError, TrainError) as error:
        raise (
            error if isinstance(error, (TaskError, PlanError)) else TaskError(error.what, error.why, error.hint)
        ) from error
    except Exception as error:  # any error of the task's code, with the line that raised it
        raise TaskError(
            f"the task {task.name} raised {place(error, task.file)}",
            why=str(error),
            hint="breakpoint() there stops this command",
        ) from error


def _rehearse(runtime: TaskRuntime, client: ClientInfo, plan: RunPlan, initial: Initial) -> TaskCheck:
    task, split, size = runtime.task, runtime.split(client), plan.local.batch
    layout, base = initial.layout, initial.vector
    if plan.local.epochs is not None and task.optional("train") is None:
        data.require_countable(split.train, plan.local.epochs, size)  # the steps below do not count passes
    module = runtime.set_up(base.copy(), None, {})
    batch = next(iter(data.shuffled(split.train, size, derive(KEY, "data"))))  # the first that is trained on below
    before = _finite(_loss(task, module, batch), "on an untrained model", "look at loss(model, batch) and at the data")
    trained, context = _trained(runtime, client, plan, 1, KEY)
    raw_update = (tensors.read(module, runtime.layout) - base) / (trained.a or 1.0)
    globs, buffers = tuple(plan.local.personal_layers), tensors.read_buffers(module, runtime.layout)
    shared, raw_update, buffers, _ = shared_model(layout, globs, raw_update, buffers, {})
    after = _finite(_loss(task, module, batch), "after one step", "a smaller [local] lr")
    spec, travels = rungs(plan.uplink)[0], travels_of(plan, shared)
    held = np.resize(base, travels.size)  # the vector behind the model is as large as the model
    news = Downlink(travels, plan.downlink.codec, held).publish(held + np.resize(raw_update, travels.size))
    payloads = _encoded(plan, spec, raw_update, travels)
    mean = WeightedMean(parse(spec).bind(travels), travels)
    mean.fold(lambda: iter(payloads), max(1, trained.examples), 1.0, trained.a or 1.0)
    parts, _ = payload.pack_reply(payloads, travels, buffers)
    began = time.perf_counter()
    again, context = _trained(runtime, client, plan, STEPS, Key(3), context)
    step_s = (time.perf_counter() - began) / STEPS
    tested = split.train if split.test is None else split.test
    sums = evaluate(module, task, tested, most=1)
    whole, histograms = whole_set(module, task, tested, sums)
    whole_names = {*whole, *names_of(histograms)}  # some may be no number on these data, as metrics of a batch
    if plan.unknown_metrics({*sums, *whole_names}):
        plan.require_metrics({*names(module, task, next(iter(data.in_order(tested, size)))), *whole_names})
    sums |= {**numbers(whole), **own_values(histograms)}
    counted_once = [name for name, (_, count) in sums.items() if count == 1]
    measured = data.examples_in(next(iter(data.in_order(tested, BATCH)))) if counted_once else 0
    runtime.require_unchanged("training" if task.optional("train") is None else "train()")
    return TaskCheck(
        layout.size, len(layout.trained), len(layout.buffers) + len(layout.of_role("fixed")),
        len(layout.of_role("frozen")), layout.digest,
        data.count(split.train), data.count(split.test) if split.test is not None else None, shapes(batch),
        before, after, initial.left_out, task.optional("train") is not None,
        {name: total / n for name, (total, n) in context.metrics.items()}, (again.steps, again.planned),
        [f"{name}: {array.dtype} {list(array.shape)}" for name, array in context.state.items()],
        {name: total / n for name, (total, n) in sums.items() if n}, counted_once if measured > 1 else [], measured,
        step_s, peak_bytes(), spec,
        sum(part.length for part in parts), sum(map(len, news.changes)) or travels.size * 4, shared.size * 4,
    )  # fmt: skip


def _trained(
    runtime: TaskRuntime, client: ClientInfo, plan: RunPlan, steps: int, key: Key, before: Context | None = None
) -> tuple[Trained, Context]:
    """Train the module for `steps`; return the counts, and the context as a task's own train() left it.

    `before` is the context of the round before, whose state the training gets.
    """
    local, max_bytes = assigned(plan, steps), int(Policy().max_state_mb * MB)
    made, state = (before.round, before.state) if before is not None else (0, {})
    context = Context(local, made + 1, made, client.name, copied(state, max_bytes), may_report(plan))
    trainer, examples = TorchTrainer(runtime.task, local), runtime.split(client).train
    is_free = runtime.task.optional("train") is not None and plan.local.steps is None  # the loop decides how many
    work = Work(0 if is_free else steps, plan.local.batch)
    trained = trainer.train(runtime.built.module, examples, work, key, context=context)
    context.state = copied(context.state, max_bytes)
    return trained, context


def travels_of(plan: RunPlan, layout: Layout) -> Layout:
    """Return the layout of everything that is sent: the model, and the control variate if the plan has one."""
    return transmitted_layout(algorithm_of(plan), layout)


def _encoded(plan: RunPlan, spec: str, raw_update: Vector, travels: Layout) -> list[Payload]:
    """Return a first update's frames; `raw_update` is donated."""
    algorithm = algorithm_of(plan)
    behind: list[Payload] = []
    if algorithm is not None:
        following = ControlVariate.of(algorithm, travels, None, np.zeros(travels.size, np.float32), counted=False)
        behind = following.differences(raw_update, spec, prng.Key(2))
    payloads, _ = encode(raw_update, ClientRunState(), spec, plan.uplink, travels, prng.Key(2))
    return payloads + behind


def _finite(loss: float, when: str, hint: str) -> float:
    if not math.isfinite(loss):
        raise TaskError(f"loss(model, batch) is {loss} {when}", why="a loss is one finite number", hint=hint)
    return loss


def assigned(plan: RunPlan, steps: int) -> Local:
    """Return the plan's [local] as the task's own train() gets it, with few steps and at most one epoch.

    A loop in epochs finds `epochs` if the plan gives them; a loop in steps finds `steps`.
    """
    local = Local.of(plan.local.model_dump(mode="json"))
    most = local.steps if isinstance(local.steps, int) else steps
    epochs = None if local.epochs is None else min(1.0, local.epochs)
    return dataclasses.replace(local, steps=min(steps, most), epochs=epochs)


def _loss(task: LoadedTask, module: torch.nn.Module, batch: Any) -> float:
    with torch.no_grad():
        return float(tensors.as_loss(task.module.loss(module, batch)))


def shapes(batch: Any) -> list[str]:
    """Return each tensor of a batch in words: float32 [32, 64]."""
    if isinstance(batch, torch.Tensor):
        return [f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"]
    if isinstance(batch, dict):
        return [f"{name}: {said}" for name, inner in batch.items() for said in shapes(inner)]
    if isinstance(batch, (list, tuple)):
        return list(itertools.chain.from_iterable(map(shapes, batch)))
    return [type(batch).__name__]


def peak_bytes() -> int:
    """Return the most memory that this process has used so far (macOS counts bytes, Linux kibibytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
