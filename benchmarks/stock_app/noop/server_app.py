"""The aggregator of the stock side: sends an array to every node, waits for all answers, again and again."""

from __future__ import annotations

import json
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write one JSON line a round to `out`: the seconds of its `send_and_receive`.

    Nothing is averaged and nothing is stored, which is in Flower's favour. Every float of the array changes from
    round to round, as a model's do: Flower would not send again what a node's store has already.
    """
    config = context.run_config
    count = int(config["nodes"])
    while len(nodes := sorted(grid.get_node_ids())) < count:
        time.sleep(0.05)
    values = np.arange(int(config["floats"]), dtype=np.float32)
    with open(str(config["out"]), "a", encoding="utf-8") as out:
        for number in range(1, int(config["rounds"]) + 1):
            values += 1
            began = time.perf_counter()
            content = RecordDict({"arrays": ArrayRecord({"w": Array(values)})})
            assignments = [
                Message(content, dst_node_id=node, message_type="query", group_id=str(number)) for node in nodes
            ]
            answers = list(grid.send_and_receive(assignments))
            seconds = time.perf_counter() - began
            failed = sum(answer.has_error() for answer in answers)
            got = sum(array.numpy().size for answer in answers if not answer.has_error() for array in _arrays(answer))
            line = {"round": number, "seconds": seconds, "answers": len(answers), "failed": failed, "floats": got}
            out.write(json.dumps(line) + "\n")
            out.flush()


def _arrays(answer: Message) -> list[Array]:
    return list(answer.content.array_records["arrays"].values())
