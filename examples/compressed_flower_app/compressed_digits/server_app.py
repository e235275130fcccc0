"""The server of a plain Flower app. The line of Thinwire is that of `wrap(...)`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

import thinwire.flower
from compressed_digits import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train by FedAvg over all nodes, and measure each round's model on the test images."""
    config = context.run_config
    net, nodes = task.model(int(config["hidden"])), int(config["nodes"])

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        measured = {"round": server_round, "at": time.time(), "accuracy": task.accuracy(net)}
        measured["uplink_payload"] = getattr(strategy, "uplink_payload", 0)
        print("ROUND", json.dumps(measured), flush=True)
        if out := str(config["out"]):
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(measured) + "\n")
        return MetricRecord({"accuracy": measured["accuracy"]})

    strategy: Strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    if codec := str(config["codec"]):
        strategy = thinwire.flower.wrap(strategy, codec, down=str(config["down"]))
    rounds, arrays = int(config["num-server-rounds"]), ArrayRecord(net.state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate)
