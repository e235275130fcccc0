"""`digits`: the MLP of examples/digits on the 8 x 8 digits, 9 610 parameters."""

from __future__ import annotations

from benchmarks.accuracy_bytes.tasks.pooled import with_all_tests
from examples.digits import task
from thinwire.client import ClientInfo, Split

model = task.model
loss = task.loss


def data(client: ClientInfo) -> Split:
    return with_all_tests(task.data, client)
