"""Execute one assignment: load the base model, evaluate, train and encode, or make the first model of a run.

`work` executes an assignment to train or evaluate. `train` and `encode_update` are its two halves, which overlap runs
in two threads. `first_model` executes an `init` assignment. Each function returns the state after it, and stores
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.downlink import ModelReplica
from thinwire.aggregation.plan_codecs import feedback_of
from thinwire.client import outbox, payload
from thinwire.client.assignment_context import AssignmentContext
from thinwire.client.errors import CannotReply
from thinwire.client.executor import local_of
from thinwire.client.payload import ControlVariate, encode
from thinwire.client.personal import PersonalExecutor, StartingValues, arrays_of, starting_values, values_of_origin
from thinwire.client.private_noise import noised, private_steps, without_divergence
from thinwire.client.train.layout import Key as WorkerKey
from thinwire.client.train.protocol import Local, TrainRequest, TrainResult, Work
from thinwire.client.train.state import are_equal
from thinwire.compression import parse
from thinwire.compression.native import cores, planned_threads
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.prng import Key
from thinwire.core.protocol import without_facts
from thinwire.core.records import replace
from thinwire.core.score_histogram import own_values
from thinwire.core.types import Assignment, Failure, ReplyHeader, Timings, Vector
from thinwire.privacy.summed_metrics import may_report, unsummed

if TYPE_CHECKING:
    from thinwire.client.executor import Executor
    from thinwire.client.run_state import ClientRunState
    from thinwire.client.train.protocol import Arrays, ClientInfo
    from thinwire.core.layout import Layout, Tensor
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Payload


OWN_METRIC = "eval/personal"  # share of the examples that were evaluated with trained personal layers
DIGITS = 4  # after the point in a stage's seconds: more are noise, and take a fifth of a small reply's header


@dataclass(frozen=True)
class Trained:
    """The result of a train or evaluate assignment before anything is encoded.

    `next_state` is the state with which the next training continues: its replica, local buffers, counters and pending
    updates count. `raw_update` is divided by the normaliser `a`, which is 1 in a secure or private round, and None if
    nothing was trained. `buffers` are the trained model's.
    """

    header: ReplyHeader
    next_state: ClientRunState
    raw_update: Vector | None = None
    buffers: Vector | None = None
    following: ControlVariate | None = None
    personal: frozenset[str] = frozenset()  # names of the tensors that stay here


@dataclass(frozen=True)
class Begun:
    """An assignment between `begin` and `finish`: its training is done or failed, and nothing is committed.

    `finish` applies its outcomes, encodes and commits. `at` is the time on the handler's clock at which the wait for
    `finish` began. `follows` are the sequences of the replies whose training this one continues with overlap, and its
    own.
    """

    job: AssignmentContext
    outcome: Trained | Failure
    at: float
    follows: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Result:
    """A reply before its commit, with the state that is committed with it. `body` holds the reply's parts."""

    header: ReplyHeader
    state: ClientRunState
    body: bytes = b""


def work(
    job: AssignmentContext, header: ReplyHeader, state: ClientRunState, executor: Executor, client: ClientInfo
) -> Result:
    """Train or evaluate, and encode the update."""
    trained = train(job, header, state, executor, client)
    return encode_update(job, trained, trained.next_state, executor.layout)


@dataclass(frozen=True)
class _LoadedModel:
    """The model that an assignment evaluates and trains from, with the state after it was loaded.

    `layout` is that of all that is sent. `params` has the size of the model. `buffers` are its own if the plan keeps
    them here, else those that came. `personal` tensors begin with the values `begin`.
    """

    layout: Layout
    params: Vector
    buffers: Vector | None
    following: ControlVariate | None
    personal: tuple[Tensor, ...]
    begin: StartingValues
    state: ClientRunState


def train(
    job: AssignmentContext, header: ReplyHeader, state: ClientRunState, executor: Executor, client: ClientInfo
) -> Trained:
    """Evaluate and train. Nothing is encoded, and of the state only what training needs is read."""
    if job.plan.privacy.mode == "example":
        state = _without_unnoised(state)
    model = _load(job, state, executor)
    request = _request(job, model)
    prepare_s = job.clock.now() - job.began
    start, alone, done = _evaluate_and_train(job, executor, client, model, request)
    header = _with_evaluation(job, header, model, (alone, done), prepare_s)
    if done.params is None or done.buffers is None:
        examples = int(max((count for _, count in header.metrics.values()), default=0))
        return Trained(replace(header, examples=examples), model.state)
    raw_update = np.subtract(done.params, start, out=done.params)
    if job.plan.is_protected:
        done = without_divergence(done, raw_update, model.begin.vector, model.buffers, job.say)
    if done.kept is not None and not np.isfinite(done.kept).all():
        raise NonFiniteUpdate("a personal layer holds NaN or infinity", hint="a smaller [local] lr")
    if job.plan.local.buffers == "local" and done.buffers is not None and not np.isfinite(done.buffers).all():
        raise NonFiniteUpdate("a local buffer holds NaN or infinity", hint="a smaller [local] lr")
    header = _with_training(job, header, model, done, raw_update)
    if request.within_s is not None and done.steps != done.planned:
        header = replace(header, planned=done.planned)
        of = f" of {done.planned}" if done.planned else ""
        job.say(f"round {job.assignment.round}: stopped after {done.steps}{of} steps, to send them in time")
    after = _state_after(job, model, executor.layout, done)
    if job.plan.local.overlap:
        after = replace(after, pending=outbox.with_update(after.pending, header, raw_update))
    raw_update /= raw_update.dtype.type(header.a)
    return Trained(header, after, raw_update, done.buffers, model.following, frozenset(t.name for t in model.personal))


def _without_unnoised(state: ClientRunState) -> ClientRunState:
    """Return the state without values in which another plan of this run may have left records without noise."""
    state = replace(state, buffers=None, counters={}, pending={})
    return state if state.noised else replace(state, residual=None, momentum=None, codec_arrays={})


def _load(job: AssignmentContext, state: ClientRunState, executor: Executor) -> _LoadedModel:
    """Bring the replica to the assignment's version, and find the values that stay on this device.

    Raises `CannotReply` for an assignment of another layout, or with work that no aggregator assigns.
    """
    assignment, local, algorithm = job.assignment, job.plan.local, algorithm_of(job.plan)
    layout, digest = transmitted_layout(algorithm, executor.layout), executor.layout.digest
    if assignment.layout_digest != digest:
        raise CannotReply("layout-mismatch", payload.OTHER_TENSORS)
    if assignment.kind == "train":
        payload.require_work(assignment.work, local.batch)
    replica = ModelReplica(layout, job.plan.downlink.codec, state.replica, state.replica_version)
    with planned_threads(local.codec_threads or cores()):
        buffers = job.environment.update_replica(assignment, job.delivery.bundle, replica)
    if (globs := local.personal_layers) and (keep_shared := job.environment.keep_shared) is not None:
        keep_shared(assignment, tuple(globs), replica.params, buffers)
    job.loaded(buffers)
    if job.plan.downlink.compressed:  # later versions come as updates to this one
        state = replace(state, layout_digest=digest, replica=replica.params, replica_version=assignment.base_version)
    counted = state.counted_in(assignment.base_version)
    following = ControlVariate.of(algorithm, layout, state.own, replica.params, counted) if algorithm else None
    if local.buffers == "local" and state.buffers is not None:
        buffers = state.buffers
    personal, begin = _personal(job, executor, state)
    return _LoadedModel(layout, replica.params[: layout.model_size], buffers, following, personal, begin, state)


def _personal(
    job: AssignmentContext, executor: Executor, state: ClientRunState
) -> tuple[tuple[Tensor, ...], StartingValues]:
    """Return the personal tensors, and the values with which they begin; none without personal layers."""
    if not isinstance(executor, PersonalExecutor):
        return (), StartingValues()
    init, personal = job.plan.run.init, executor.personal
    return personal, starting_values(personal, state.personal, job.folder, job.assignment, init, job.say)


def _request(job: AssignmentContext, model: _LoadedModel) -> TrainRequest:
    """Return what the executor is to do for the assignment."""
    assignment, plan, state = job.assignment, job.plan, model.state
    trains, algorithm = assignment.kind == "train", algorithm_of(plan)
    return TrainRequest(
        measure=job.may_measure and _is_measured(assignment, plan), train=trains,
        local=local_of(plan.local, assignment.work.clip, algorithm.prox if algorithm else 0.0),
        work=Work(assignment.work.steps, assignment.work.batch), key=job.train_key, counters=state.counters,
        schedule=job.schedule_after(len(state.pending)),
        within_s=job.train_within_s(4 * model.layout.size),
        shift=model.following.shift if model.following and trains else None,
        private=private_steps(plan, model.layout.model_size) if plan.privacy.mode == "example" else None,
        kept=model.begin.vector, round=assignment.round, version=assignment.base_version,
        may_report=may_report(plan), may_diverge=plan.is_protected, max_state_bytes=job.max_state_bytes,
        state=_state_of(job, state) if trains else {},
    )  # fmt: skip


def _evaluate_and_train(
    job: AssignmentContext, executor: Executor, client: ClientInfo, model: _LoadedModel, request: TrainRequest
) -> tuple[Vector, TrainResult, TrainResult]:
    """Return the vector from which training began, the result of a separate evaluation, and the result of the request.

    With pending updates training does not begin at the model version, so the version is evaluated separately.
    """
    start, alone = model.params, TrainResult()
    if request.train and model.state.pending:
        start = outbox.starting_vector(model.params, model.state.pending)
        if request.measure:
            evaluation, request = replace(request, train=False, state={}), replace(request, measure=False)
            alone = job.do(executor, evaluation, client, model.params, model.buffers)
    return start, alone, job.do(executor, request, client, start, model.buffers)


def _with_evaluation(
    job: AssignmentContext, header: ReplyHeader, model: _LoadedModel, results: Sequence[TrainResult], prepare_s: float
) -> ReplyHeader:
    """Return the header with the metrics of evaluation and the times of all stages before encoding."""
    histograms = {name: histogram for result in results for name, histogram in result.histograms.items()}
    if job.plan.is_protected and (reason := unsummed(job.plan, histograms)):
        raise CannotReply("task-error", reason)
    sums = {name: value for result in results for name, value in result.sums.items()} | own_values(histograms)
    metrics = {f"eval/{name}": value for name, value in sums.items()}
    if model.personal and (seen := max((count for _, count in metrics.values()), default=0)):
        metrics[OWN_METRIC] = (seen if model.begin.vector is not None else 0.0, seen)
    evaluate_s, train_s = sum(result.measure_s for result in results), sum(result.train_s for result in results)
    load_s = sum((result.load_s for result in results), prepare_s)
    stages = (job.delivery.download_s, job.queue_s, evaluate_s, train_s, 0.0, load_s)
    spent = Timings(*(round(seconds, DIGITS) for seconds in stages))
    return replace(header, histograms=histograms, metrics=metrics, timings=spent)


def _with_training(
    job: AssignmentContext, header: ReplyHeader, model: _LoadedModel, done: TrainResult, raw_update: Vector
) -> ReplyHeader:
    """Return the header with the metrics of training, and the facts of the raw update."""
    metrics = {**header.metrics, **{f"train/{name}": value for name, value in done.reported.items()}}
    if done.loss[1]:
        metrics["train/loss"] = done.loss
    algorithm = algorithm_of(job.plan)
    whole = job.plan.is_protected or (algorithm is not None and algorithm.sends_undivided)
    return replace(
        header, metrics=metrics, examples=done.examples, steps=done.steps, a=1.0 if whole else done.a,
        norm=payload.norm(raw_update), lost=model.begin.lost,
    )  # fmt: skip


def _state_after(job: AssignmentContext, model: _LoadedModel, layout: Layout, done: TrainResult) -> ClientRunState:
    """Return the state with the values that stay on this device: counters, local buffers, personal layers, context."""
    keeps = job.plan.local.buffers == "local" and done.buffers is not None and done.buffers.size
    state = replace(
        model.state, layout_digest=layout.digest, counters=done.counters, buffers=done.buffers if keeps else None,
        personal=arrays_of(done.kept, model.personal) if model.personal else {},
    )  # fmt: skip
    if done.state is None or are_equal(done.state, state.context):  # then no file is written again
        return state
    return replace(state, context=done.state)


def _state_of(job: AssignmentContext, state: ClientRunState) -> Arrays:
    """Return the state of a task's own train(); `CannotReply` if the owner has lowered the limit below it.

    A client that has trained nothing in this run begins with that of the run in `[run] init = "run:ID"`.
    """
    begins = not (state.context or state.sequence)
    origin = values_of_origin(job.folder, job.plan.run.init) if begins else None
    arrays = origin.context if origin else state.context
    if sum(array.nbytes for array in arrays.values()) > job.max_state_bytes:
        why = "this run's context.state holds more than [policy] max_state_mb allows since"
        raise CannotReply("declined", f"max_state_mb: {why}")
    return arrays


def train_finite(
    job: AssignmentContext, header: ReplyHeader, state: ClientRunState, executor: Executor, client: ClientInfo
) -> Trained:
    """Train as `train` does; raise `NonFiniteUpdate` if training diverged, as nothing is encoded yet."""
    trained = train(job, header, state, executor, client)
    if not math.isfinite(trained.header.norm):
        raise NonFiniteUpdate("the update holds NaN or infinity", why="training diverged", hint="a smaller [local] lr")
    return trained


def encode_update(job: AssignmentContext, trained: Trained, state: ClientRunState, model: Layout) -> Result:
    """Encode an update and return the reply with the state after it: its residual, and the codec's own arrays."""
    header, raw_update, buffers = trained.header, trained.raw_update, trained.buffers
    if raw_update is None or buffers is None:
        return Result(header, state)
    local, begun, layout = job.plan.local, job.clock.now(), transmitted_layout(algorithm_of(job.plan), model)
    if job.plan.privacy.mode == "local":
        raw_update = noised(raw_update, job.plan, layout)
    with planned_threads(local.codec_threads or cores()):
        payloads, state = _encode(job, raw_update, state, layout, trained.following)
    residual = state.residual if feedback_of(job.plan.uplink) == "classic" else None  # with EF21 it is the reference
    averaged = local.buffers == "average"
    parts, body = payload.pack_reply(payloads, layout, buffers if averaged else None)
    if job.plan.is_protected:
        return Result(without_facts(replace(header, parts=parts, codec=job.assignment.codec)), state, body)
    shared = {name: n for name, n in trained.next_state.counters.items() if name not in trained.personal}
    header = replace(
        header, parts=parts, codec=job.assignment.codec, residual_norm=payload.norm(residual),
        counters=shared if averaged else {},
        timings=replace(header.timings, encode_s=round(job.clock.now() - begun, DIGITS)),
    )  # fmt: skip
    return Result(header, state, body)


def _encode(
    job: AssignmentContext, raw_update: Vector, state: ClientRunState, layout: Layout, following: ControlVariate | None
) -> tuple[list[Payload], ClientRunState]:
    """Return an update's frames, and the state after it; `raw_update` is donated."""
    assignment, uplink, key = job.assignment, job.plan.uplink, job.key("encode")
    control_frames = following.differences(raw_update, assignment.codec, key) if following else []
    payloads, state = encode(raw_update, state, assignment.codec, uplink, layout, key, assignment.round)
    payloads += control_frames
    state = replace(state, noised=job.plan.privacy.mode == "example")
    return payloads, replace(state, own=following.moved(payloads, assignment.codec)) if following else state


def _is_measured(assignment: Assignment, plan: RunPlan) -> bool:
    """Return True if the assignment evaluates its model version, alone or before it trains."""
    is_due = (assignment.round - 1) % plan.run.evaluate_every == 0 and not assignment.is_follow_up
    evaluates_first = plan.run.evaluate == "clients" and assignment.evaluates and is_due
    return assignment.kind == "evaluate" or evaluates_first


def first_model(
    job: AssignmentContext, header: ReplyHeader, state: ClientRunState, executor: Executor, client: ClientInfo
) -> Result:
    """Return the first model of a run as a reply; the state does not change.

    The model is what the task's `model()` makes from the run's seed, the same on any device. It is sent whole and
    without loss, as float32, and no outcome of it comes. Raises `CannotReply` if this device's model has other tensors
    than the run's, and `NonFiniteUpdate` if `model()` makes NaN or infinity.

    Invariant: no data of the device are read.
    """
    assignment, layout = job.assignment, executor.layout
    if assignment.layout_digest != layout.digest:
        raise CannotReply("layout-mismatch", payload.OTHER_TENSORS)
    request = TrainRequest(
        measure=False, train=False, local=Local.of(job.plan.local.model_dump(mode="json")), work=Work(),
        key=WorkerKey(job.plan.run.seed), first=True,
    )  # fmt: skip
    done = job.do(executor, request, client, np.zeros(layout.size, np.float32), None)
    if done.params is None or not np.isfinite(done.params).all():
        raise NonFiniteUpdate("the first model holds NaN or infinity", why="model() makes it so")
    codec = parse("identity").bind(layout)
    frames = [
        codec.encode(done.params[segment.span], codec.init(segment.index), Key(0), segment.index).payload
        for segment in layout.segments
    ]
    parts, body = payload.pack_reply(frames, layout, done.buffers)
    return Result(replace(header, examples=1, a=1.0, parts=parts, counters=done.counters), state, body)
