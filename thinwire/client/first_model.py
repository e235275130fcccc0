"""Make the first model of a run: the reply to an `init` assignment.

The model is what the task's `model()` makes from the run's seed, the same on any device. It is sent whole and without
loss. It is no update: no outcome of it comes, and the state of the run does not change.

Invariant: no data of the device are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.client import payload
from thinwire.client.assignment_context import AssignmentContext
from thinwire.client.errors import CannotReply
from thinwire.client.execute import Result
from thinwire.client.train import layout as keys
from thinwire.client.train.protocol import Local, TrainRequest, Work
from thinwire.compression import parse
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.prng import Key
from thinwire.core.records import replace

if TYPE_CHECKING:
    from thinwire.client.executor import Executor
    from thinwire.client.run_state import ClientRunState
    from thinwire.client.train.protocol import ClientInfo
    from thinwire.core.types import ReplyHeader


def first_model(
    job: AssignmentContext, header: ReplyHeader, state: ClientRunState, executor: Executor, client: ClientInfo
) -> Result:
    """Return the first model of a run as a reply; the state does not change.

    The frames are the parameters themselves, as float32. Raises `CannotReply` if this device's model has other tensors
    than the run's, and `NonFiniteUpdate` if `model()` makes NaN or infinity.
    """
    assignment, layout = job.assignment, executor.layout
    if assignment.layout_digest != layout.digest:
        raise CannotReply("layout-mismatch", payload.OTHER_TENSORS)
    request = TrainRequest(
        measure=False,
        train=False,
        local=Local.of(job.plan.local.model_dump(mode="json")),
        work=Work(),
        key=keys.Key(job.plan.run.seed),
        first=True,
    )
    done = job.do(executor, request, client, np.zeros(layout.size, np.float32), None)
    if done.params is None or not np.isfinite(done.params).all():
        raise NonFiniteUpdate("the first model holds NaN or infinity", why="model() makes it so")
    codec = parse("identity").bind(layout)
    frames = [
        codec.encode(done.params[segment.span], codec.init(segment.index), Key(0), segment.index).payload
        for segment in layout.segments
    ]
    parts, body = payload.packed(frames, layout, done.buffers)
    return Result(replace(header, examples=1, a=1.0, parts=parts, counters=done.counters), state, body)
