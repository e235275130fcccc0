"""The first model of a run from this device: what its task's model() makes from the run's seed, sent whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thinwire.aggregation import parse
from thinwire.client.answering import exchange
from thinwire.client.answering.job import Job
from thinwire.client.answering.work import Result
from thinwire.client.compute import keys
from thinwire.client.compute.local import Local, Work
from thinwire.client.compute.order import Order
from thinwire.client.failures import CannotAnswer
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.keys import Key
from thinwire.core.types import ReplyHead

if TYPE_CHECKING:
    from thinwire.client.bench import Bench
    from thinwire.client.compute.site import Site
    from thinwire.client.disk.state import RunState


def first_model(job: Job, head: ReplyHead, state: RunState, bench: Bench, site: Site) -> Result:
    """Fill the head; of the state nothing changes. Its frames are the parameters themselves, as float32."""
    ask, layout = job.ask, bench.layout
    if ask.layout_digest != layout.digest:
        raise CannotAnswer("layout-mismatch", exchange.OTHER_TENSORS)
    order = Order(
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
    parts, body = exchange.packed(frames, layout, done.buffers)
    return Result(replace(head, examples=1, a=1.0, parts=parts, counters=done.counters), state, body)
