"""Two lines in an app of Flower's own simulation: `Context.state` keeps the residual of each node from actor to actor.

Ray is no dependency of ours: `make flower-next` installs it into an environment of its own and runs this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from thinwire.flower import mod, wrap

NODES, ROUNDS, SIZE = 2, 4, 4000
STEP = np.repeat(np.array([1.0, 0.6], np.float32), SIZE // 2)  # topk(0.5) sends the second half only with feedback


def client() -> ClientApp:
    """An app that adds the same step in each round."""
    app = ClientApp(mods=[mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        values = message.content.array_records["arrays"]["w"].numpy() + STEP
        metrics = MetricRecord({"num-examples": 1, "states": len(context.state.array_records)})
        arrays = ArrayRecord({"w": Array(values)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_residual_of_each_node_lasts_from_round_to_round_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: make flower-next")
    from flwr.simulation import run_simulation

    out, server = tmp_path / "out.json", ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy: Any = wrap(FedAvg(fraction_evaluate=0.0, min_available_nodes=NODES), "topk(0.5)", down="fp16")
        first = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
        result = strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS)
        states = [metrics["states"] for metrics in result.train_metrics_clientapp.values()]
        halves = result.arrays["w"].numpy().reshape(2, -1).mean(axis=1).tolist()
        told = {"halves": halves, "states": states, "payload": strategy.uplink_payload, "dense": strategy.uplink_dense}
        out.write_text(json.dumps(told))

    resources: Any = {"init_args": {"num_cpus": 2, "include_dashboard": False}, "client_resources": {"num_cpus": 1}}
    run_simulation(server, client(), NODES, backend_config=resources)
    told = json.loads(out.read_text())
    assert told["states"] == [0, 2, 2, 2], "the state before and after the last update, from round 2 on"
    assert told["halves"][1] > 1.0, "without the residual nothing of the second half is ever sent"
    assert sum(told["halves"]) == pytest.approx(1.6 * ROUNDS, abs=2.1), "what is missing is in the residual"
    assert told["payload"] < 0.7 * told["dense"]
