"""Our task as a Flower ClientApp: a stock node trains it and answers with our codec's frames.

What the node trains is named on its own command line, never from outside:
`flower-supernode --node-config 'task="path/to/task.py" partition="0/2" data="path" home="folder"'`.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from thinwire.core.errors import UsageError
from thinwire.core.fleet import Delivery
from thinwire.core.home import find_home, private_folder
from thinwire.core.messages import ask_from_bytes, reply_to_bytes
from thinwire.flower.stock.carrying import Carried

from flwr.app import Context, Message  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip


def client_app() -> ClientApp:
    """An app that answers `query` with the model that a run begins with, and `train` with an update."""
    app = ClientApp()

    @app.query()
    def describe(message: Message, context: Context) -> Message:
        return Message(described(Carried.read(message), context).content(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(trained(Carried.read(message), context).content(), reply_to=message)

    return app


def described(asked: Carried, context: Context) -> Carried:
    """Layout and first model, drawn by the run's seed, with the fixed tensors behind it.

    The aggregator never imports task code.
    """
    from thinwire.aggregation.buffers import pack_fixed
    from thinwire.client import load_task
    from thinwire.client.initial import initial_model
    from thinwire.server.model.versions import Versions

    said = json.loads(asked.head)
    made = initial_model(load_task(_spec(said["task"], context)), int(said["seed"]))
    with tempfile.TemporaryDirectory() as folder:
        versions = Versions(Path(folder), made.layout)
        stored = versions.write(0, made.vector, made.buffers, made.counters, time.time())
        parts = versions.path(0).read_bytes() + pack_fixed(made.fixed)
    head = {"layout": made.layout.to_json(), "digest": stored.digest, "parts": stored.parts, "counters": made.counters}
    return Carried(json.dumps(head).encode(), parts)


def trained(asked: Carried, context: Context) -> Carried:
    """One ask answered as our own client would; residuals are kept in the node's folder from round to round."""
    from thinwire.client import Site, load_task
    from thinwire.client.session import Session

    ask, name = ask_from_bytes(asked.head), f"node-{context.node_id}"
    folder = private_folder(_home(context) / name)
    part, _, parts = str(context.node_config.get("partition", "0/1")).partition("/")
    data = context.node_config.get("data")
    split = str(context.node_config.get("split", "iid"))
    site = Site(name, Path(str(data)) if data else None, int(part), int(parts or 1), split)
    session = Session(name, load_task(_spec(ask.task, context)), folder, site)
    with tempfile.NamedTemporaryFile(dir=folder) as bundle:
        bundle.write(asked.parts)
        bundle.flush()
        delivery = Delivery(ask, Path(bundle.name))
        reply, file = session.answer(delivery, cancelled=lambda: False, say=lambda line: print(line, flush=True))
    return Carried(reply_to_bytes(reply), file.read_bytes() if file else b"")


def _spec(name: str, context: Context) -> str:
    """What the node's owner named, under the run's name for it, which comes from outside: `=` would begin a module."""
    from thinwire.client.compute.task import NAME

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
