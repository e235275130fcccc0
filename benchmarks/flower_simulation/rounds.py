"""Rounds of Flower's own simulation (Ray): run by the Python of an environment that has `flwr[simulation]`.

    python -m benchmarks.flower_simulation.rounds WORK CLIENTS ASKED ROUNDS ACTORS

Prints one JSON line: seconds of each round. A round sends the parameters to ASKED of CLIENTS nodes and takes theirs;
the server does nothing with them. Each actor has one CPU and one torch thread, and keeps what it has read of the data.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks.flower_simulation import clients

FLOATS = 10_000
WORK, CLIENTS, ASKED, ROUNDS, ACTORS = sys.argv[1], *(int(given) for given in sys.argv[2:])
server = ServerApp()


def first() -> ArrayRecord:
    """Zeros of as many floats as the work's model has."""
    if WORK == "noop":
        return ArrayRecord([np.zeros(FLOATS, np.float32)])
    return ArrayRecord(clients.model().state_dict())


@server.main()
def main(grid: Grid, _context: Context) -> None:
    while len(nodes := list(grid.get_node_ids())) < CLIENTS:
        time.sleep(0.1)
    draw, arrays, seconds = np.random.default_rng(1), first(), []
    for number in range(ROUNDS):
        chosen = draw.choice(len(nodes), ASKED, replace=False)
        began = time.perf_counter()
        content = RecordDict({"arrays": arrays, "work": ConfigRecord({"name": WORK})})
        selected = [
            Message(content=content, message_type="train", dst_node_id=nodes[index], group_id=str(number))
            for index in chosen
        ]
        answers = list(grid.send_and_receive(selected))
        seconds.append(time.perf_counter() - began)
        if len(answers) != ASKED or any(answer.has_error() for answer in answers):
            raise RuntimeError(f"{len(answers)} answers of {ASKED}")
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    resources: Any = {
        "init_args": {"num_cpus": ACTORS, "include_dashboard": False},
        "client_resources": {"num_cpus": 1},
    }
    run_simulation(server, clients.app, CLIENTS, backend_config=resources)
