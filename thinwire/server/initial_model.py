"""Initial model from a device (`[run] init = "device"`): the run selects one device before the first round, then
another if it fails.

The seed decides which device is selected. Each assignment and its outcome are journalled before anything follows from
them, so a run that was killed continues with the same device. The run accepts one reply: the first valid one, from the
device that is selected. It becomes version 0 when it is durable, and later replies are discarded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from thinwire.aggregation import BufferMean
from thinwire.aggregation.downlink import BUFFERS
from thinwire.compression import parse
from thinwire.core.errors import BadPayload, TooFewClients
from thinwire.core.events import RunNoted
from thinwire.core.fleet import ClientDisconnected, Envelope
from thinwire.core.formatting import Reason, counted
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed
from thinwire.core.types import Assignment, Failure, ReplyHeader, Vector
from thinwire.server.aggregator import MAX_VALUE, max_magnitude
from thinwire.server.context import POLL_S, RECONNECT_S, RunContext
from thinwire.server.policy.assignment_terms import DEADLINE_MARGIN, MAX_NAMED_DEVICES, UNMEASURED_DEADLINE_S, Deadline
from thinwire.server.state.initial_model_requests import MAX_FAILED_DEVICES, lengthened_deadline
from thinwire.store.device_profiles import THIN_BYTES_S, update_bytes, work_key

HINT = "look at the task's model() there; or leave [run] init out, and it is made where you type"


def take_first_model(running: RunContext) -> bool:
    """Select one device after the other until one has sent an initial model; return False if the run is stopped.

    Raise `TooFewClients` with the reasons of the devices in three cases. The total time in which no device could be
    selected exceeds `[cohort] wait_s`. If that is 0, which waits forever: all connected devices have failed for good,
    and no disconnected device is waited for. Or MAX_FAILED_DEVICES devices have failed for good.
    """
    first, waited_s = running.run_state.first, 0.0
    while not running.must_stop():
        assigned = first.open or _next(running)
        if assigned is None:
            waited_s += _wait(running, waited_s)
            continue
        answer = _answer(running, assigned)
        if answer is None:
            break
        if isinstance(answer, ReplyHeader):
            try:
                _begin(running, answer)
                return True
            except BadPayload as error:
                _fail(running, assigned, "bad-payload", error.what)
                running.fleet.ack([answer.update_id])
        else:
            _fail(running, assigned, *answer)
            running.fleet.cancel([assigned.assignment_id])
    return False


def _next(running: RunContext) -> FirstModelAssigned | None:
    """Select a device, record its assignment and return it; None if no device can be selected now."""
    first, unable = running.run_state.first, _unable(running)
    able = [device for device in running.online.names if device not in unable]
    if not able or len(first.failed_permanently(_max_attempts(running))) >= MAX_FAILED_DEVICES:
        return None
    device = first.next_device(able, running.plan.run.seed)
    why = [Reason("seed", {"devices": len(able)})]
    if first.times[device]:
        why.append(Reason("selected-again", {}))
    if first.failed is not None and first.failed.device != device:
        why.append(Reason("instead-of", {"device": first.failed.device, "kind": first.failed.kind}))
    deadline, assignment_id = _deadline(running, device), _assignment_id(running, device)
    assigned = FirstModelAssigned(
        running.clock.wall(), device, assignment_id, why, deadline.seconds, deadline.reasons, running.elapsed
    )  # fmt: skip
    running.record(assigned)
    return assigned


def _assignment_id(running: RunContext, device: str) -> str:
    """Return an `assignment_id` that differs from those of withdrawn assignments, because devices may still work on
    them.
    """
    late = running.run_state.first.late[device]
    return f"{running.run_id}.init{f'-{late}' if late else ''}.{device}"


def _fail(running: RunContext, assigned: FirstModelAssigned, kind: str, reason: str) -> None:
    """Record that an assignment failed."""
    now, elapsed = running.clock.wall(), running.elapsed
    digest = running.online.report_digest(assigned.device)
    running.record(FirstModelFailed(now, assigned.device, assigned.assignment_id, kind, reason, elapsed, digest))


def _max_attempts(running: RunContext) -> int:
    """Return how many requests a device gets that disconnects or misses its deadline each time."""
    return running.plan.cohort.retry_limit + 1


def _reasons_text(reasons: Mapping[str, str]) -> str:
    """Return the reasons of the first devices, and the number of the other devices."""
    more = f"; and {len(reasons) - MAX_NAMED_DEVICES} more" if len(reasons) > MAX_NAMED_DEVICES else ""
    return "; ".join(f"{device}: {why}" for device, why in itertools.islice(reasons.items(), MAX_NAMED_DEVICES)) + more


def _unable(running: RunContext) -> dict[str, str]:
    """Return device -> reason for the connected devices that are not selected now."""
    online, first = running.online.hellos, running.run_state.first
    excluded = first.excluded(running.elapsed, _max_attempts(running), running.online.report_digest)
    return running.unable() | {device: why for device, why in excluded.items() if device in online}


def _wait(running: RunContext, waited_s: float) -> float:
    """Poll once while no device can be selected, and return the seconds that took; `waited_s` is the sum of earlier
    calls.

    Raise `TooFewClients` as `take_first_model` describes.
    """
    began, unable, wait_s = running.elapsed, _unable(running), running.plan.cohort.wait_s
    first, most, revoked = running.run_state.first, _max_attempts(running), running.revoked()
    report_digest = running.online.report_digest
    if len(failed := first.failed_permanently(most)) >= MAX_FAILED_DEVICES:
        why = f"{counted(len(failed), 'device')} failed for good, the last of them {_reasons_text(failed)}"
        raise TooFewClients("no device gave the first model", why=why, hint=HINT)
    passing = first.may_recover(began, most, report_digest) - revoked
    still_failing = {device: why for device, why in first.reasons(report_digest).items() if device not in revoked}
    reasons = _reasons_text(dict(sorted({**still_failing, **failed, **unable}.items())))
    none_can_recover = bool(unable) and not passing and began >= running.reconnect_until_s
    if waited_s > wait_s if wait_s else none_can_recover:
        raise TooFewClients(
            "no device gave the first model",
            why=reasons or f"nobody was there for {wait_s:g} s",
            hint=HINT,
        )
    running.status("waiting", f"waiting: no device can give the first model now{f' ({reasons})' if reasons else ''}")
    running.fleet.ack([header.update_id for header in running.poll(POLL_S) if isinstance(header, ReplyHeader)])
    return running.elapsed - began


def _deadline(running: RunContext, device: str) -> Deadline:
    """Return the deadline for a device: it follows from the model's size, its link, and its missed deadlines so far."""
    layout = running.task_layout
    up_bytes = update_bytes("identity", layout, {}) + FLOAT_BYTES * BufferMean(layout).layout.size
    up = running.device_profiles.device(device, work_key(running.plan, running.layout)).up
    one = first_model_deadline(up_bytes, up.seconds(up_bytes).p90 if up else None)
    return lengthened_deadline(one, running.run_state.first.late[device])


def _answer(running: RunContext, assigned: FirstModelAssigned) -> ReplyHeader | tuple[str, str] | None:
    """Return the device's reply, or kind and text of its failure; None if the run is stopped.

    A reply from before a restart is accepted first, so that the device need not make it again. The assignment is sent
    when the device is connected, which may take a while after a restart.
    """
    device, until, back_by = assigned.device, assigned.elapsed_s + assigned.deadline_s, running.elapsed + RECONNECT_S
    running.status("running", f"assigning the first model to {device}")
    sent, wait_s = False, 0.0
    while not running.must_stop():
        for arrival in running.poll(min(wait_s, max(0.0, until - running.elapsed))):
            match arrival:
                case ReplyHeader() if (arrival.update_id.device, arrival.assignment_id) == (
                    device,
                    assigned.assignment_id,
                ):
                    if device in running.revoked():
                        running.fleet.ack([arrival.update_id])
                        return "refused", "revoked"
                    return arrival
                case ReplyHeader():
                    running.fleet.ack([arrival.update_id])
                case Failure(kind, text, assignment_id, _) if assignment_id == assigned.assignment_id:
                    return kind, text
                case ClientDisconnected(left, why) if left == device:
                    return "refused" if why == "revoked" else "offline", why
        if running.elapsed >= until:
            return "stale", f"no answer within {assigned.deadline_s:g} s"
        if not sent and running.elapsed >= back_by:
            return "offline", "did not come back"
        if not sent and device in running.online.hellos:
            running.assign([_envelope(running, assigned)])
            sent = True
        wait_s = POLL_S
    if running.stopped == "run":
        running.fleet.cancel([assigned.assignment_id])
    return None


def _envelope(running: RunContext, assigned: FirstModelAssigned) -> Envelope:
    plan = running.plan_cache.plan_for(assigned.device, running.online.hellos.get(assigned.device))
    return Envelope(
        assigned.device,
        Assignment(
            assigned.assignment_id, running.run_id, running.plan.run.task, "init", plan,
            layout_digest=running.task_layout.digest, deadline_s=assigned.deadline_s,
            identity=running.identity,
        ),
    )  # fmt: skip


def _begin(running: RunContext, header: ReplyHeader) -> None:
    """Make the model durable as version 0, and continue the run from it."""
    params, buffers, counters = _model(running, header)
    first = np.concatenate([params, np.zeros(running.layout.size - params.size, np.float32)])
    now = running.clock.wall()
    stored = running.versions.write(0, first, buffers, counters, now)
    running.record(RunNoted(now, [Reason("first-model-of", {"device": header.update_id.device})]), stored)
    running.begin()
    running.fleet.ack([header.update_id])


def _model(running: RunContext, header: ReplyHeader) -> tuple[Vector, Vector, dict[str, int]]:
    """Return the parameters, the averaged buffers and the counters of a reply.

    Raise `BadPayload` if its parts do not fit the layout, or a value is too large.
    """
    layout: Layout = running.task_layout
    mean, names = BufferMean(layout), [f"frame/{segment.index}" for segment in layout.segments]
    if [part.name for part in header.parts] != [*names, *([BUFFERS] if mean.layout.size else [])]:
        raise BadPayload("a first model whose parts are not those of the run's")
    params, frames = np.zeros(layout.size, np.float32), list(running.fleet.open(header.update_id))
    codec = parse("identity").bind(layout)
    for segment, frame in zip(layout.segments, frames, strict=False):
        codec.decode_add(frame, 1.0, params[segment.span], segment=segment.index)
    if len(frames) > len(names):
        mean.check(frames[-1])
        mean.fold(frames[-1], 1.0)
    mean.check_counters(header.counters, {})
    mean.count(header.counters)
    if not (found := max_magnitude(params)) <= MAX_VALUE:
        raise BadPayload(f"a first model that holds {found:g}", why=f"at most {MAX_VALUE:g} can be stepped from")
    return params, mean.close(np.zeros(mean.layout.size, np.float32)), mean.counters


def first_model_deadline(up_bytes: int, up_s: float | None) -> Deadline:
    """Return the time for a device to make the initial model and upload the whole of it.

    It is the time of a device about which nothing is known, plus three times the upload. `up_s` is the time within
    which nine of ten such uploads end; None if the device's link was never measured.

    >>> first_model_deadline(3_000_000, 0.5)  # doctest: +NORMALIZE_WHITESPACE
    Deadline(seconds=61.5, reasons=[Reason(code='upload', numbers={'make_s': 60.0, 'margin': 3.0, 'upload_s': 0.5,
    'bytes': 3000000})], usual_s=None)
    >>> [reason.code for reason in first_model_deadline(3_000_000, None).reasons]
    ['upload', 'thin-link']
    """
    sent_s = up_bytes / THIN_BYTES_S if up_s is None else up_s
    make_s, margin = UNMEASURED_DEADLINE_S, DEADLINE_MARGIN
    reasons = [Reason("upload", {"make_s": make_s, "margin": margin, "upload_s": sent_s, "bytes": up_bytes})]
    if up_s is None:
        reasons.append(Reason("thin-link", {"mbit_s": 8e-6 * THIN_BYTES_S}))
    return Deadline(math.ceil(10 * (make_s + margin * sent_s)) / 10, reasons)
