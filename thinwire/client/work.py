"""What a training or measuring ask comes to: base model, measuring, training, encoding. Nothing is kept here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thinwire.aggregation.downlink import Shadow
from thinwire.client import exchange, tensors
from thinwire.client.evaluate import evaluate
from thinwire.client.failures import CannotAnswer
from thinwire.client.trainer import TorchTrainer
from thinwire.core.keys import Key, derive
from thinwire.core.types import Ask, ReplyHead, Timings, Vector

if TYPE_CHECKING:
    from thinwire.client.bench import Bench
    from thinwire.client.site import Split
    from thinwire.client.state import RunState
    from thinwire.core.fleet import Delivery
    from thinwire.core.plan import RunPlan

Say = Callable[[str], None]
SAY_EVERY_S = 1.0


@dataclass
class Job:
    """One ask with what stands around it. `device` is this device's name: what is drawn depends on it."""

    delivery: Delivery
    plan: RunPlan
    device: str
    cancelled: Callable[[], bool]
    say: Say
    queue_s: float = 0.0
    slow_step_s: float = 0.0

    def __post_init__(self) -> None:
        self.until = time.monotonic() - self.queue_s + self.ask.deadline_s
        self._said_at = 0.0

    @property
    def ask(self) -> Ask:
        return self.delivery.ask

    def key(self, purpose: str, label: str | int) -> Key:
        return derive(Key(self.plan.run.seed), purpose, self.device, label)

    def progress(self, done: int, total: int) -> None:
        """One line a second."""
        now = time.monotonic()
        if now - self._said_at < SAY_EVERY_S and done != total:
            return
        self._said_at = now
        left = self.until - now
        deadline = f", deadline in {left:.0f} s" if left >= 0 else f", {-left:.0f} s over the deadline"
        of = f"{done}/{total}" if total else str(done)
        self.say(f"round {self.ask.round}: train {of} steps" + (deadline if self.ask.deadline_s else ""))


@dataclass(frozen=True)
class Result:
    """An answer that is made and not yet committed, with the state that belongs to it."""

    head: ReplyHead
    state: RunState
    body: bytes = b""


def work(job: Job, head: ReplyHead, state: RunState, bench: Bench, split: Split, shadow: Shadow) -> Result:
    """Fill the head. Measuring comes before training: its figures are of the model as the aggregator sent it."""
    ask, local, layout = job.ask, job.plan.local, bench.layout
    if ask.layout_digest != layout.digest:
        raise CannotAnswer("layout-mismatch", "this device's model has other tensors than the run's")
    shared = exchange.take_base(ask, job.delivery.bundle, shadow)
    own = local.buffers == "local" and state.buffers is not None
    module = bench.set_up(shadow.params, state.buffers if own else shared, dict(state.counters))
    metrics: dict[str, tuple[float, float]] = {}
    begun = time.perf_counter()
    if split.test is not None and _is_measured(ask, job.plan):
        job.say(f"round {ask.round}: measure" if ask.kind == "train" else "measure the last model")
        found = evaluate(module, bench.task, split.test, device=bench.device, cancelled=job.cancelled)
        metrics = {f"eval/{name}": value for name, value in found.items()}
    spent = Timings(job.delivery.download_s, job.queue_s, evaluate_s=time.perf_counter() - begun)
    if ask.kind == "evaluate":
        examples = int(max((count for _, count in metrics.values()), default=0))
        return Result(replace(head, examples=examples, metrics=metrics, timings=spent), state)

    begun = time.perf_counter()
    trainer = TorchTrainer(bench.task, local, bench.device, job.slow_step_s)
    done = trainer.train(module, split.train, ask.work, job.key("train", ask.round), job.progress, job.cancelled)
    change = tensors.read(module, layout)
    change -= shadow.params
    spent, begun = replace(spent, train_s=time.perf_counter() - begun), time.perf_counter()
    if done.loss[1]:
        metrics["train/loss"] = done.loss
    head = replace(head, examples=done.examples, steps=done.steps, a=done.a, norm=exchange.norm(change))
    change /= change.dtype.type(done.a)
    payloads, residual = exchange.encode(
        change, state.residual, ask.codec, layout, job.key("encode", ask.ask_id), job.plan.uplink.feedback != "none"
    )
    buffers, counters = tensors.read_buffers(module, layout), tensors.read_counters(module, layout)
    averaged = local.buffers == "average"
    parts, body = exchange.packed(payloads, layout, buffers if averaged else None)
    head = replace(
        head, metrics=metrics, parts=parts, codec=ask.codec, residual_norm=exchange.norm(residual),
        counters=counters if averaged else {}, timings=replace(spent, encode_s=time.perf_counter() - begun),
    )  # fmt: skip
    kept: Vector | None = buffers if local.buffers == "local" and buffers.size else None
    return Result(
        head,
        replace(state, layout_digest=layout.digest, residual=residual, counters=counters, buffers=kept),
        body,
    )


def _is_measured(ask: Ask, plan: RunPlan) -> bool:
    if ask.kind == "evaluate":
        return True
    return plan.run.evaluate == "clients" and (ask.round - 1) % plan.run.evaluate_every == 0
