"""The client of a plain Flower app. The line of Thinwire is that of `mod()`."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import thinwire.flower
from compressed_digits import task

app = ClientApp(mods=[thinwire.flower.mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this node's part of the images."""
    config, node = context.run_config, context.node_config
    number, parts = int(node["partition-id"]), int(node["num-partitions"])
    net = task.model(int(config["hidden"]))
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    images = task.part(number, parts)
    seed = 1000 * int(message.content.config_records["config"]["server-round"]) + number
    loss = task.train(net, images, int(config["local-epochs"]), float(config["learning-rate"]), seed)
    metrics = MetricRecord({"num-examples": len(images), "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
