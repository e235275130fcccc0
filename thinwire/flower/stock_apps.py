"""This module holds the Flower apps with which stock Flower nodes train our plans: a ServerApp and a ClientApp.

`server_app` sends assignments to stock nodes and aggregates their frames with our weighted mean. Its rounds are plain
and synchronous: no overlap, no exactly-once, no resume, no replay protection. These need our own client.

`client_app` trains our task on a stock node and replies with our codec's frames. The node's owner names the task on the
node's command line: `flower-supernode --node-config 'task="path/to/task.py" partition="0/2" data="path"
home="folder"'`. Invariant: the aggregator cannot choose the task's file.

`Carried` is one of our assignments or replies in a Flower message: a header as JSON bytes, then its parts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.aggregation import codecs
from thinwire.aggregation.mean import unpack_fixed
from thinwire.aggregation.plan_codecs import codec_of
from thinwire.core.errors import BadPayload, DataLost, TaskError, TooFewClients, UsageError
from thinwire.core.events import ModelStored
from thinwire.core.fleet import Delivery
from thinwire.core.formatting import capped_text, counted
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.protocol import read_json
from thinwire.core.serialization import (
    MAX_HEADER_BYTES,
    assignment_from_bytes,
    assignment_to_bytes,
    reply_from_bytes,
    reply_to_bytes,
)
from thinwire.core.statedir import find_home, private_folder, private_opener
from thinwire.core.types import Assignment, Failure, Fixed, ReplyHeader, UpdateId, UpdateOutcome, Work
from thinwire.flower.stock_plan import model_file, require_possible

from flwr.app import ConfigRecord, Context, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp import Grid, ServerApp  # isort: skip

if TYPE_CHECKING:
    from thinwire.server.aggregator import RoundAggregator
    from thinwire.server.model_store import Versions
    from thinwire.server.round_close import AggregatedUpdate


ROUND_S, NODES_S, NODES_CHECK_S = 300.0, 120.0, 0.5
UNREADABLE = (BadPayload, DataLost, TaskError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def server_app(plan: Path) -> ServerApp:
    """Return an app that runs the plan with `nodes` stock nodes (run config; default 1), and writes the model `out`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        read = require_possible(RunPlan.load(plan, codecs=codecs))
        out = model_file(str(context.run_config.get("out", "")))
        if rounds := int(context.run_config.get("rounds", 0)):
            read = read.model_copy(update={"run": read.run.model_copy(update={"rounds": rounds})})
        with tempfile.TemporaryDirectory() as folder:
            run = StockRun(grid, read, f"{read.run.task}-{context.run_id}", Path(folder))
            run.make(int(context.run_config.get("nodes", 1)))
            if out is not None:
                run.export(out)

    return app


@dataclass
class StockRun:
    """Runs a plan's rounds over a Grid; `payload_bytes` counts the frames that arrived."""

    grid: Grid
    plan: RunPlan
    run_id: str
    folder: Path
    payload_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    _max_header: int = MAX_HEADER_BYTES  # bytes of an update's header, which follow from the first model
    _outcomes: dict[int, list[UpdateOutcome]] = field(default_factory=dict)
    fixed: Fixed = field(init=False, default_factory=dict)
    _weights: dict[str, int] = field(default_factory=dict)  # see server/aggregator.py

    def make(self, nodes: int) -> None:
        """Run all rounds, and print one line for each."""
        from thinwire.server.aggregator import Model
        from thinwire.server.service import limit_of

        versions, stored = self._first(self._nodes(nodes))
        layout = versions.layout
        self.model = Model(layout, *versions.read(stored), dict(stored.counters))
        self._max_header = limit_of(self.plan, layout).header_bytes
        for number in range(1, self.plan.run.rounds + 1):
            stored = self._round(number, self._nodes(nodes), versions, stored)
        made = counted(self.plan.run.rounds, "round")
        print(f"thinwire: done, {made}, {self.payload_bytes} bytes of frames", flush=True)

    def export(self, path: Path) -> None:
        """Write the model as safetensors."""
        from safetensors.numpy import save_file

        from thinwire.aggregation.downlink import named_tensors

        model = self.model
        tensors = named_tensors(model.layout, model.params, model.buffers, model.counters, self.fixed)
        save_file(tensors, path, {"format": "pt"})

    def _nodes(self, wanted: int) -> list[int]:
        """Wait for so many nodes and return them; raise TooFewClients after NODES_S seconds."""
        end = time.monotonic() + NODES_S
        while len(found := sorted(self.grid.get_node_ids())) < wanted:
            if time.monotonic() > end:
                raise TooFewClients(f"{len(found)} of {wanted} nodes are there", hint="start more flower-supernodes")
            time.sleep(NODES_CHECK_S)
        return found

    def _first(self, nodes: Sequence[int]) -> tuple[Versions, ModelStored]:
        """Return the first model of the first node that gives a valid one; an unreadable reply does not end the run."""
        from thinwire.server.aggregator import require_values
        from thinwire.server.model_store import Versions

        for node in nodes:
            try:
                layout, stored, body = self._begin(node)
                length = sum(part[1] for part in stored.parts)
                self.fixed = unpack_fixed(layout, body[length:])
                versions = Versions(self.folder, layout)
                with open(versions.path(0), "wb", opener=private_opener) as file:
                    file.write(body[:length])
                require_values(versions.read(stored)[0])
            except UNREADABLE as error:
                print(f"thinwire: node {node} gave no first model: {type(error).__name__}: {error}", flush=True)
                continue
            return versions, stored
        raise TooFewClients("no node gave the first model", hint="look at the task's model() there")

    def _begin(self, node: int) -> tuple[Layout, ModelStored, bytes]:
        request = Carried(json.dumps({"task": self.plan.run.task, "seed": self.plan.run.seed or 0}).encode())
        (reply,) = self._exchange("query", {node: request}).values()
        said = read_json(reply.header, MAX_HEADER_BYTES)
        parts = [(str(name), int(length), str(digest)) for name, length, digest in said["parts"]]
        stored = ModelStored(time.time(), 0, said["digest"], "v000000.model", parts, said["counters"])
        return Layout.from_json(said["layout"]), stored, reply.parts

    def _round(self, number: int, nodes: Sequence[int], versions: Versions, stored: ModelStored) -> ModelStored:
        from thinwire.server.aggregator import RoundAggregator, SumConfig, caps_of
        from thinwire.server.evaluation import pooled_metrics
        from thinwire.server.policy.assignment_terms import work_of
        from thinwire.server.round_close import add_again, aggregated_without

        codec, work = codec_of(self.plan.uplink, number - 1), work_of(self.plan, len(nodes))
        model_file = (self.folder / stored.file).read_bytes()
        assignments = {
            node: Carried(assignment_to_bytes(self._assign(number, node, stored, codec, work)), model_file)
            for node in nodes
        }
        fold: RoundAggregator
        aggregated: dict[int, AggregatedUpdate]
        config = SumConfig(self._weights, counters=stored.counters, steps_of=lambda header: work.steps)
        new = partial(RoundAggregator, self.plan, versions.layout, codec, config)
        fold, aggregated = new(), {}
        for node, reply in self._exchange("train", assignments).items():
            try:
                header = reply_from_bytes(reply.header, self._max_header)
                if isinstance(header, ReplyHeader):
                    aggregated[node] = header, partial(_frames, reply.parts, header), 1.0
                    fold.add(*aggregated[node])
            except BadPayload as error:
                if rejected := aggregated.pop(node, None):
                    self._outcomes[node] = [UpdateOutcome(rejected[0].update_id, "dropped")]
                print(f"thinwire: round {number}: node {node} sent an invalid update: {error}", flush=True)
                continue
            if isinstance(header, Failure):
                print(f"thinwire: round {number}: node {node} failed, {header.kind}: {header.text}", flush=True)
        headers = [header for header, _, _ in aggregated.values()]
        caps = caps_of(self.plan, headers)
        for update_id, capped in (less := fold.capped(caps, headers)).items():
            found = UpdateId.parse(update_id)
            print(f"thinwire: round {number}: {found.device}: {capped_text(capped)}", flush=True)
        if less:
            new = partial(RoundAggregator, self.plan, versions.layout, codec, replace(config, caps=caps))
            add_again(fold := new(), list(aggregated.values()))
        if not fold.fits():
            fold, spoilers = aggregated_without(new, list(aggregated.values()))
            for node in [node for node, (header, _, _) in aggregated.items() if header in spoilers]:
                self._outcomes[node] = [UpdateOutcome(aggregated.pop(node)[0].update_id, "dropped")]
                print(f"thinwire: round {number}: node {node} sent numbers too large to be added", flush=True)
        if not aggregated:
            raise TooFewClients(f"no node answered in round {number}")
        fold.step(self.model, number - 1)
        headers = [header for header, _, _ in aggregated.values()]
        self.payload_bytes += sum(header.payload_bytes for header in headers)
        self._outcomes |= {
            node: [UpdateOutcome(header.update_id, "aggregated", number)] for node, (header, _, _) in aggregated.items()
        }
        self._weights |= fold.weights.new if fold.weights else {}
        self.metrics = pooled_metrics(headers)
        print(f"thinwire: round {number}: {len(headers)} of {len(nodes)} nodes, {self.metrics}", flush=True)
        return versions.write(number, self.model.params, self.model.buffers, self.model.counters, time.time())

    def _assign(self, number: int, node: int, stored: ModelStored, codec: str, work: Work) -> Assignment:
        from thinwire.server.model_store import parts_of

        return Assignment(
            assignment_id=f"{self.run_id}.{number}.node-{node}", run=self.run_id, task=self.plan.run.task, kind="train",
            plan=self.plan.to_json(), round=number, base_version=stored.version, base_digest=stored.digest,
            layout_digest=self.model.layout.digest, codec=codec,
            work=work, deadline_s=ROUND_S,
            parts=parts_of(stored), outcomes=tuple(self._outcomes.get(node, ())),
        )  # fmt: skip

    def _exchange(self, kind: str, assignments: dict[int, Carried]) -> dict[int, Carried]:
        """Send messages and return each node's reply; a node that fails or does not reply is left out."""
        messages = [
            Message(request.content(), dst_node_id=node, message_type=kind, ttl=ROUND_S)
            for node, request in assignments.items()
        ]
        found = {}
        for reply in self.grid.send_and_receive(messages, timeout=ROUND_S):
            if reply.has_error():
                print(f"thinwire: node {reply.metadata.src_node_id}: {reply.error.reason}", flush=True)
                continue
            try:
                found[reply.metadata.src_node_id] = Carried.read(reply)
            except BadPayload as error:
                print(f"thinwire: node {reply.metadata.src_node_id}: {error}", flush=True)
        return found


def _frames(parts: bytes, header: ReplyHeader) -> Iterator[bytes]:
    at = 0
    for part in header.parts:
        yield parts[at : at + part.length]
        at += part.length


def client_app() -> ClientApp:
    """Return an app that answers `query` with a run's first model and `train` with an update."""
    app = ClientApp()

    @app.query()
    def describe(message: Message, context: Context) -> Message:
        return Message(described(Carried.read(message), context).content(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(trained(Carried.read(message), context).content(), reply_to=message)

    return app


def described(request: Carried, context: Context) -> Carried:
    """Return the layout and the first model, drawn by the run's seed, followed by the fixed tensors.

    The node makes them because the aggregator never imports a task's code.
    """
    from thinwire.aggregation.mean import pack_fixed
    from thinwire.client import load_task
    from thinwire.client.task import initial_model
    from thinwire.server.model_store import Versions

    said = json.loads(request.header)
    made = initial_model(load_task(_spec(said["task"], context)), int(said["seed"]))
    with tempfile.TemporaryDirectory() as folder:
        versions = Versions(Path(folder), made.layout)
        stored = versions.write(0, made.vector, made.buffers, made.counters, time.time())
        parts = versions.path(0).read_bytes() + pack_fixed(made.fixed)
    header = {
        "layout": made.layout.to_json(),
        "digest": stored.digest,
        "parts": stored.parts,
        "counters": made.counters,
    }
    return Carried(json.dumps(header).encode(), parts)


def trained(request: Carried, context: Context) -> Carried:
    """Carry out one assignment as our own client would; residuals are kept in the node's directory between rounds."""
    from thinwire.client import ClientInfo, load_task
    from thinwire.client.handler import AssignmentHandler

    assignment, name = assignment_from_bytes(request.header), f"node-{context.node_id}"
    folder = private_folder(_home(context) / name)
    part, _, parts = str(context.node_config.get("partition", "0/1")).partition("/")
    data = context.node_config.get("data")
    split = str(context.node_config.get("split", "iid"))
    client = ClientInfo(name, Path(str(data)) if data else None, int(part), int(parts or 1), split)
    handler = AssignmentHandler(load_task(_spec(assignment.task, context)), folder, client)
    with tempfile.NamedTemporaryFile(dir=folder) as bundle:
        bundle.write(request.parts)
        bundle.flush()
        delivery = Delivery(assignment, Path(bundle.name))
        reply, file = handler.handle(delivery, cancelled=lambda: False, say=lambda line: print(line, flush=True))
    return Carried(reply_to_bytes(reply), file.read_bytes() if file else b"")


def _spec(name: str, context: Context) -> str:
    """Return the spec of the owner's task under the run's name for it; raise UsageError if that name is not valid.

    The name comes from outside, and a `=` in it would begin the path of a module.
    """
    from thinwire.client.train.task import NAME

    if not NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is no task's name")
    return f"{name}={_module(context)}"


def _module(context: Context) -> str:
    if not (found := context.node_config.get("task")):
        raise UsageError(
            "this node has no task",
            why="its --node-config names none",
            hint="--node-config 'task=\"path/to/task.py\"'",
        )
    return str(found)


def _home(context: Context) -> Path:
    given = context.node_config.get("home")
    return Path(str(given)).expanduser() if given else find_home() / "stock"


RECORD, HEAD, PARTS = "thinwire", "header", "parts"


@dataclass(frozen=True)
class Carried:
    """Holds the content of one message: a header and parts."""

    header: bytes
    parts: bytes = b""

    @classmethod
    def read(cls, message: Message) -> Carried:
        """Read a message; raise `BadPayload` if it belongs to another app."""
        record = message.content.config_records.get(RECORD)
        header, parts = (record.get(name) if record else None for name in (HEAD, PARTS))
        if not isinstance(header, bytes) or not isinstance(parts, bytes):
            raise BadPayload("a Flower message that is not ours", why=f"it has no {RECORD} record")
        return cls(header, parts)

    def content(self) -> RecordDict:
        """Return the content as Flower's record."""
        return RecordDict({RECORD: ConfigRecord({HEAD: self.header, PARTS: self.parts})})
