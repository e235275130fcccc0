"""Somebody else's Flower app: FedAvg over four numbers, with all nodes that there are."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    nodes = int(context.run_config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(4, np.float32)]), num_rounds=1)
    print("RESULT", len(list(grid.get_node_ids())), result.arrays.to_numpy_ndarrays()[0].tolist(), flush=True)


@client.train()
def train(msg: Message, context: Context) -> Message:
    numbers = msg.content.array_records["arrays"].to_numpy_ndarrays()[0] + float(context.node_config["add"])
    content = RecordDict({"arrays": ArrayRecord([numbers]), "metrics": MetricRecord({"num-examples": 10})})
    return Message(content, reply_to=msg)
