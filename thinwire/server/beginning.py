"""The first model from a device, [run] init = "device": one that the seed draws is asked, and if it cannot, the next.

Before the first round. The model is version 0 as soon as it is durable; a run that is killed before asks the same
device again, which answers with the same bytes.
"""

from __future__ import annotations

import numpy as np

from thinwire.aggregation import BufferMean, parse
from thinwire.aggregation.model_file import BUFFERS
from thinwire.core.errors import BadPayload, TooFewClients
from thinwire.core.events import RunNoted
from thinwire.core.fleet import Envelope, NodeLeft
from thinwire.core.layout import Layout
from thinwire.core.types import Ask, Failure, ReplyHead, Vector
from thinwire.server.running import POLL_S, Running
from thinwire.server.spares import in_drawn_order

WITHIN_S = 600.0  # nothing is known of its link yet, and the whole model comes up it


def take_first_model(running: Running) -> bool:
    """Ask one device after the other until one has given a model; False when the run was stopped meanwhile.

    `TooFewClients` when none of those that are there can give one, with what each said.
    """
    said = dict[str, str]()
    while not running.stop_ordered():
        unable = running.unable()
        able = [device for device in running.presence.devices if device not in unable and device not in said]
        if not able:
            raise TooFewClients(
                "no device gave the first model",
                why="; ".join(f"{device}: {why}" for device, why in {**unable, **said}.items()),
                hint="look at the task's model() there; or leave [run] init out, and it is made where you type",
            )
        device = in_drawn_order(able, running.plan.run.seed, 0)[0]
        running.status("running", f"asking {device}, which the seed drew from {len(able)}, for the first model")
        answer = _answer(running, device)
        if answer is None:
            break
        if isinstance(answer, str):
            said[device] = answer
            continue
        try:
            _begin(running, answer)
            return True
        except BadPayload as error:
            said[device] = error.what
            running.fleet.ack([answer.update_id])
    return False


def _answer(running: Running, device: str) -> ReplyHead | str | None:
    """What a device sends, or why it sends nothing; None when the run was stopped."""
    ask_id, until = f"{running.run_id}.init.{device}", running.elapsed + WITHIN_S
    plan = running.holders.plan_for(device, running.presence.hellos.get(device))
    digest = running.task_layout.digest
    ask = Ask(ask_id, running.run_id, running.plan.run.task, "init", plan, layout_digest=digest, deadline_s=WITHIN_S)
    running.ask([Envelope(device, ask)])
    why: str | None = None
    while why is None and not running.stop_ordered():
        if running.elapsed >= until:
            why = f"no answer within {WITHIN_S:.0f} s"
        for arrival in running.poll(min(POLL_S, max(0.0, until - running.elapsed))):
            match arrival:
                case ReplyHead() if (arrival.update_id.device, arrival.ask_id) == (device, ask_id):
                    return arrival
                case ReplyHead():
                    running.fleet.ack([arrival.update_id])
                case Failure(kind, text, failed, _) if failed == ask_id:
                    why = f"{kind}: {text}"
                case NodeLeft(left, _) if left == device:
                    why = "it left"
    running.fleet.cancel([ask_id])
    return why


def _begin(running: Running, head: ReplyHead) -> None:
    """Make the model durable as version 0, and go on from it."""
    params, buffers, counters = _model(running, head)
    first = np.concatenate([params, np.zeros(running.layout.size - params.size, np.float32)])
    now = running.clock.wall()
    stored = running.versions.write(0, first, buffers, counters, now)
    running.record(RunNoted(now, f"the first model is {head.update_id.device}'s"), stored)
    running.begin()
    running.fleet.ack([head.update_id])


def _model(running: Running, head: ReplyHead) -> tuple[Vector, Vector, dict[str, int]]:
    """What an answer holds: parameters, averaged buffers (in half precision, as they always travel), and counters."""
    layout: Layout = running.task_layout
    mean, names = BufferMean(layout), [f"frame/{segment.index}" for segment in layout.segments]
    if [part.name for part in head.parts] != [*names, *([BUFFERS] if mean.layout.size else [])]:
        raise BadPayload("a first model whose parts are not those of the run's")
    params, frames = np.zeros(layout.size, np.float32), list(running.fleet.open(head.update_id))
    codec = parse("identity").bind(layout)
    for segment, frame in zip(layout.segments, frames, strict=False):
        codec.decode_add(frame, 1.0, params[segment.span], segment=segment.index)
    if len(frames) > len(names):
        mean.check(frames[-1])
        mean.fold(frames[-1], 1.0)
    mean.count(head.counters)
    if not np.isfinite(params).all():
        raise BadPayload("a first model that holds NaN or infinity")
    return params, mean.close(np.zeros(mean.layout.size, np.float32)), mean.counters
