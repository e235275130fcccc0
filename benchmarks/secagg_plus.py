"""Flower's side of `benchmarks.secure_sum`: SecAgg+. This file calls flwr, and nothing else of that benchmark does.

`SecAggPlusWorkflow` runs its four stages on a grid of ours, which hands each message to `secaggplus_mod`, the code of
Flower's clients. So all work is done by Flower's own functions, with its defaults: 2^22 steps in [-8, 8], modulus 2^32,
int64 arrays. All clients are neighbours, and the threshold is ours. Measured are the calls of `secaggplus_mod` for one
client, and the workflow's stages that sum and unmask, without the calls of clients in them. Left out, in their favour:
the wire, and training.

All clients pass all stages. If the cohort is large, only the first one masks a vector of the model's size, and the
others' replies hold one array of random integers, the same for all: a workflow sums it as it sums any other. So the sum
means nothing there, and the workflow's memory lacks the n arrays of 8 bytes a parameter that Flower's grid returns at
once. In a small cohort all vectors are real, and the mean is checked.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarray_to_bytes,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Stage
from flwr.common.secure_aggregation.secaggplus_constants import Key as Field
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.task_identity import TaskIdentity

from benchmarks.secure_case import WEIGHT, WEIGHT_MAX, Case, Meter, row_of

WHOLE = 200_000  # parameters of all clients together: up to that, every client masks a vector of the model's size


def measure(case: Case, threshold: int) -> dict[str, Any]:
    """Run a round of Flower's; what it says has the same names as ours."""
    random.seed(3)  # the workflow shuffles the nodes
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    grid, workflow = _Grid(case), SecAggPlusWorkflow(1.0, threshold, max_weight=WEIGHT_MAX)
    state, context = WorkflowState(), grid.context()
    steps = (
        workflow.setup_stage,
        workflow.share_keys_stage,
        workflow.collect_masked_vectors_stage,
        workflow.unmask_stage,
    )
    for step in steps:
        grid.measured = step in steps[2:]
        if grid.measured:
            with grid.server:
                done = step(grid, context, state)  # type: ignore[arg-type]  # Flower types its grid
        else:
            done = step(grid, context, state)  # type: ignore[arg-type]  # Flower types its grid
        if not done:
            raise RuntimeError(f"SecAgg+ stopped in {step.__name__}")
    if grid.whole:
        np.testing.assert_allclose(grid.mean, case.vector(), atol=1e-4)
    return row_of(case, grid.keys, grid.vector, grid.server, grid.uplink, threshold)


@dataclass
class _Grid:
    """Hands messages to the mod of each client, and replies in their order; meters the first client's work."""

    case: Case
    keys: Meter = field(default_factory=Meter)
    vector: Meter = field(default_factory=Meter)
    server: Meter = field(default_factory=Meter)
    uplink: int = 0
    measured: bool = False  # the stage that runs is the aggregator's to be measured
    mean: Any = None

    def __post_init__(self) -> None:
        self.nodes = list(range(1, self.case.clients + 1))
        self.whole = self.case.clients * self.case.params <= WHOLE
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in self.nodes}

    def context(self) -> Any:
        """Return what the stages read of a LegacyContext: records, a strategy, a history, and who is there."""
        records = RecordDict(
            {
                MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: 1}),
                MAIN_PARAMS_RECORD: ArrayRecord(),
            }
        )
        strategy = SimpleNamespace(configure_fit=self._configure_fit, aggregate_fit=self._aggregate_fit)
        manager = SimpleNamespace(num_available=lambda: len(self.nodes))
        return SimpleNamespace(state=records, strategy=strategy, client_manager=manager, history=None)

    def _configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def _aggregate_fit(self, _: int, results: list[tuple[Any, FitRes]], failures: list[Any]) -> tuple[None, Any]:
        assert not failures
        if self.whole:
            self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}

    def send_and_receive(self, messages: Iterable[Message], timeout: float | None = None) -> list[Message]:
        """Return the replies of the clients that are not lost; the time of clients is not the aggregator's."""
        del timeout
        asked = [(message.metadata.dst_node_id, message) for message in messages]
        stage = asked[0][1].content.config_records[RECORD_KEY_CONFIGS][Field.STAGE]
        if stage == Stage.COLLECT_MASKED_VECTORS:
            asked = [(node, message) for node, message in asked if node <= self.case.clients - self.case.lost]
        if not self.measured:
            return [self._reply(node, message) for node, message in asked]
        self.server.stop()
        replies = [self._reply(node, message) for node, message in asked]
        if stage == Stage.COLLECT_MASKED_VECTORS:
            self.server.base()
        self.server.start()
        return replies

    def _reply(self, node: int, message: Message) -> Message:
        """Return a client's reply; the wire would have made the message its own, so its content is a copy."""
        record = dict(message.content.config_records[RECORD_KEY_CONFIGS])
        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(record)})
        own = Message(content, dst_node_id=node, message_type=message.metadata.message_type)
        masks = record[Field.STAGE] == Stage.COLLECT_MASKED_VECTORS
        if node != self.nodes[0]:
            reply = secaggplus_mod(own, self.contexts[node], self._trains(self.whole))
            if masks and not self.whole:
                reply.content.config_records[RECORD_KEY_CONFIGS][Field.MASKED_PARAMETERS] = self._random
            return reply
        meter = self.vector if masks else self.keys
        if masks:
            meter.base()
        trains = self._trains(True)
        with meter:
            reply = secaggplus_mod(own, self.contexts[node], trains)
        self.uplink += sum(map(_size, reply.content.config_records[RECORD_KEY_CONFIGS].values()))
        return reply

    def _trains(self, whole: bool) -> Any:
        """Return the app of a client: an update that is ready, of the model's size or of one parameter."""
        x = self.case.vector() if whole and self.measured else np.zeros(1, np.float32)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([x]), WEIGHT, {})
        content = fitres_to_recorddict(result, keep_input=False)
        return lambda message, _: Message(content, reply_to=message)

    @cached_property
    def _random(self) -> list[bytes]:
        """The masked arrays that stand for those of each other client: the factor's, and the parameters'."""
        rng = np.random.default_rng(4)
        return [ndarray_to_bytes(rng.integers(0, 1 << 32, size, np.int64)) for size in (1, self.case.params)]


def _size(value: Any) -> int:
    """The bytes of a value of a record, a number in 8, without the names and the wire's own."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, bytes | str) else 8
