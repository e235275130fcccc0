"""`code_lm`: the language model of examples/code_lm, 1.0 M parameters, on Python's own library."""

from __future__ import annotations

from benchmarks.accuracy_bytes.tasks.pooled import once, with_all_tests
from examples.code_lm import task
from thinwire.client import ClientInfo, Split

MEASURED = 16  # windows of each client: 20 480 symbols of 20 clients

model = task.model
loss = task.loss
metrics = once(task.metrics)


def data(client: ClientInfo) -> Split:
    return with_all_tests(task.data, client, MEASURED)
