"""Execute one assignment: load the base model, evaluate, train and encode, or make the first model of a run.

`work` handles an assignment to train or evaluate. `trained` and `encoded` are its two halves, which overlap runs in two
threads. `first_model` makes the model of an `init` assignment: what the task's `model()` makes from the run's seed,
sent whole. Nothing is stored here: each function returns the state after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from thinwire.aggregation.control_variates import algorithm_of, carried
from thinwire.aggregation.downlink import ModelReplica
from thinwire.client import outbox, payload
from thinwire.client.context import AssignmentContext
from thinwire.client.errors import CannotAnswer
from thinwire.client.payload import ControlVariate, encode
from thinwire.client.train import layout as keys
from thinwire.client.train.protocol import Local, TrainRequest, TrainResult, Work
from thinwire.compression import parse
from thinwire.compression.native.threads import cores, planned_threads
from thinwire.core import types
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.prng import Key
from thinwire.core.types import Ask, ReplyHeader, Timings, Vector

if TYPE_CHECKING:
    from thinwire.aggregation.control_variates import Algorithm
    from thinwire.client.executor import Executor
    from thinwire.client.run_state import ClientRunState
    from thinwire.client.train.protocol import Site
    from thinwire.core.layout import Layout
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Payload


MAX_STEPS = 2**40  # multiplied by the batch of a step, it still fits the integers of every machine


@dataclass(frozen=True)
class Trained:
    """The result of a train or evaluate assignment before anything is encoded.

    `carried` is the state with which the next training continues: its replica, local buffers, counters and pending
    updates count. `change` is the raw update divided by the normaliser `a`, None if nothing was trained. `buffers` are
    the trained model's.
    """

    head: ReplyHeader
    carried: ClientRunState
    change: Vector | None = None
    buffers: Vector | None = None
    following: ControlVariate | None = None


@dataclass(frozen=True)
class Result:
    """A reply that is made and not committed, with the state that belongs to it. `body` holds the reply's parts."""

    head: ReplyHeader
    state: ClientRunState
    body: bytes = b""


def least_kept_bytes(plan: RunPlan, model: Layout) -> int:
    """Return the bytes of the vectors that a run keeps at least on a device that trains in it: residual and replica."""
    vectors = (plan.uplink.feedback != "none") + plan.downlink.compressed
    return 4 * vectors * carried(algorithm_of(plan), model).size


def work(job: AssignmentContext, head: ReplyHeader, state: ClientRunState, bench: Executor, site: Site) -> Result:
    """Train or evaluate, and encode the update."""
    found = trained(job, head, state, bench, site)
    return encoded(job, found, found.carried, bench.layout)


def trained(job: AssignmentContext, head: ReplyHeader, state: ClientRunState, bench: Executor, site: Site) -> Trained:
    """Evaluate and train. Nothing is encoded, and of the state only what training needs is read."""
    ask, local, algorithm = job.ask, job.plan.local, algorithm_of(job.plan)
    layout = carried(algorithm, bench.layout)  # of everything that is sent: the model, then a control variate
    if ask.layout_digest != bench.layout.digest:
        raise CannotAnswer("layout-mismatch", payload.OTHER_TENSORS)
    if ask.kind == "train":
        _require_work(ask.work, local.batch)
    shadow = ModelReplica(layout, job.plan.downlink.codec, state.shadow, state.shadow_version)
    with planned_threads(local.codec_threads or cores()):
        shared = job.take_base(ask, job.delivery.bundle, shadow)
    if job.plan.downlink.compressed:
        own_base = shadow.params  # later versions come as updates to it
        state = replace(state, layout_digest=bench.layout.digest, shadow=own_base, shadow_version=ask.base_version)
    base = shadow.params[: layout.model_size]
    counted = state.counted_in(ask.base_version)
    following = ControlVariate.of(algorithm, layout, state.own, shadow.params, counted) if algorithm else None
    own = local.buffers == "local" and state.buffers is not None
    order = TrainRequest(
        measure=job.may_measure and _is_measured(ask, job.plan), train=ask.kind == "train",
        local=_local(ask, job.plan, algorithm),
        work=Work(ask.work.steps, ask.work.batch), key=job.train_key, counters=state.counters,
        slow_step_s=job.slow_step_s, schedule=job.schedule_after(len(state.pending)),
        within_s=job.train_within_s(4 * layout.size),
        shift=following.shift if following and ask.kind == "train" else None,
    )  # fmt: skip
    buffers = state.buffers if own else shared
    start, measured = base, TrainResult()
    if order.train and state.pending:
        start = outbox.start(base, state.pending)
        if order.measure:  # evaluate the model version itself, not the point from which training continues
            alone, order = replace(order, train=False), replace(order, measure=False)
            measured = job.do(bench, alone, site, base, buffers)
    done = job.do(bench, order, site, start, buffers)
    metrics = {f"eval/{name}": value for name, value in {**measured.sums, **done.sums}.items()}
    spent = Timings(
        job.delivery.download_s, job.queue_s, evaluate_s=measured.measure_s + done.measure_s, train_s=done.train_s
    )
    head = replace(head, metrics=metrics, timings=spent)
    if done.params is None or done.buffers is None:
        examples = int(max((count for _, count in metrics.values()), default=0))
        return Trained(replace(head, examples=examples), state)

    change = done.params
    change -= start
    if done.loss[1]:
        metrics["train/loss"] = done.loss
    a = 1.0 if algorithm and algorithm.whole else done.a
    head = replace(head, examples=done.examples, steps=done.steps, a=a, norm=payload.norm(change))
    if order.within_s is not None and done.steps != done.planned:
        head = replace(head, planned=done.planned)
        of = f" of {done.planned}" if done.planned else ""
        job.say(f"round {ask.round}: stopped after {done.steps}{of} steps, to send them in time")
    if local.overlap:
        state = replace(state, pending=outbox.with_one(state.pending, head, change))
    change /= change.dtype.type(a)
    kept: Vector | None = done.buffers if local.buffers == "local" and done.buffers.size else None
    state = replace(state, layout_digest=bench.layout.digest, counters=done.counters, buffers=kept)
    return Trained(head, state, change, done.buffers, following)


def encoded(job: AssignmentContext, found: Trained, state: ClientRunState, model: Layout) -> Result:
    """Encode an update and return the reply with the state after it: its residual, and the codec's own arrays."""
    head, change, buffers = found.head, found.change, found.buffers
    if change is None or buffers is None:
        return Result(head, state)
    local, begun, layout = job.plan.local, job.clock.now(), carried(algorithm_of(job.plan), model)
    with planned_threads(local.codec_threads or cores()):
        payloads, state = _encoded(job, change, state, layout, found.following)
    averaged = local.buffers == "average"
    parts, body = payload.packed(payloads, layout, buffers if averaged else None)
    head = replace(
        head, parts=parts, codec=job.ask.codec, residual_norm=payload.norm(state.residual),
        counters=found.carried.counters if averaged else {},
        timings=replace(head.timings, encode_s=job.clock.now() - begun),
    )  # fmt: skip
    return Result(head, state, body)


def _encoded(
    job: AssignmentContext, change: Vector, state: ClientRunState, layout: Layout, following: ControlVariate | None
) -> tuple[list[Payload], ClientRunState]:
    """Return an update's frames, and the state after it; `change` is donated."""
    ask, uplink, key = job.ask, job.plan.uplink, job.key("encode")
    behind = following.differences(change, ask.codec, key) if following else []
    payloads, state = encode(change, state, ask.codec, uplink, layout, key, ask.round)
    payloads += behind
    return payloads, replace(state, own=following.moved(payloads, ask.codec)) if following else state


def _require_work(asked: types.Work, batch: int) -> None:
    """Raise `CannotAnswer` for steps or batches that no aggregator assigns: batches are the plan's, or smaller."""
    if not (1 <= asked.batch <= batch and asked.steps <= MAX_STEPS):
        said = f"{asked.steps} steps with batches of {asked.batch} examples; the plan has batches of {batch}"
        raise CannotAnswer("protocol", said)


def _local(ask: Ask, plan: RunPlan, algorithm: Algorithm | None) -> Local:
    """Return the plan's [local], with what the round and the algorithm set in its place."""
    instead = {"clip_grad": ask.work.clip} if ask.work.clip else {}
    instead |= {"prox": algorithm.prox} if algorithm and algorithm.prox else {}
    return Local.of(plan.local.model_dump(mode="json") | instead)


def _is_measured(ask: Ask, plan: RunPlan) -> bool:
    if ask.kind == "evaluate":
        return True
    return plan.run.evaluate == "clients" and not ask.further and (ask.round - 1) % plan.run.evaluate_every == 0


def first_model(
    job: AssignmentContext, head: ReplyHeader, state: ClientRunState, bench: Executor, site: Site
) -> Result:
    """Return the first model of a run as a reply; the state does not change.

    The frames are the parameters themselves, as float32.
    """
    ask, layout = job.ask, bench.layout
    if ask.layout_digest != layout.digest:
        raise CannotAnswer("layout-mismatch", payload.OTHER_TENSORS)
    order = TrainRequest(
        measure=False, train=False, local=Local.of(job.plan.local.model_dump(mode="json")), work=Work(),
        key=keys.Key(job.plan.run.seed), first=True,
    )  # fmt: skip
    done = job.do(bench, order, site, np.zeros(layout.size, np.float32), None)
    if done.params is None or not np.isfinite(done.params).all():
        raise NonFiniteUpdate("the first model holds NaN or infinity", why="model() makes it so")
    codec = parse("identity").bind(layout)
    frames = [
        codec.encode(done.params[segment.span], codec.init(segment.index), Key(0), segment.index).payload
        for segment in layout.segments
    ]
    parts, body = payload.packed(frames, layout, done.buffers)
    return Result(replace(head, examples=1, a=1.0, parts=parts, counters=done.counters), state, body)
