"""Run the client: the program on a device that trains a task on local data and makes each update count exactly once.

Read the files in this order:

    agent           the service: `serve` starts the loop with the handlers of a `Device`
    loop            pull an assignment, have it handled, push the reply
    reloader        reload the tasks and the policy between two assignments
    handler         one assignment, one committed reply
    outbox          exactly-once delivery and overlap, as pure steps from one state to the next
    run_state       the state of one run, and its commit to disk
    run_store       the states of all runs, and the plans that this device keeps
    personal        the layers that stay on the client: their values in training, and with which a run begins
    personal_files  what is kept of them after a run, and the whole model
    assignment_context  one assignment with its keys, schedule, deadline and limits, and the expected upload time
    execute         the work of one assignment: load the model, evaluate, train, encode; make a first model
    payload         frames to vectors and back, for both directions
    executor        the task in this process or in a worker
    worker_process  the worker: its socket, its watchdog, its Python
    train/          the code that the worker runs; it imports nothing else of Thinwire
    adapters/       tasks of models that other libraries train: scikit-learn, Lightning, transformers
    secure          the phases of a secure round: advertise, answer, encode on the lattice, mask
    admission       admit or decline an assignment, count it, limit its time
    policy_rules    what the owner's policy forbids
    privacy_ledger  what this device's data have spent of privacy, as durable lines
    booking         what such a line is about: a data set, and a release
    policy          the keys of the owner's policy
    device_info     memory, cores, power, the price of the link
    calls           repeat calls to the aggregator, send replies in the background, write the status file
    errors          an error as it leaves the device: its class and place, never its text
    task            a task as the command line names it and a hello reports it
    task_check      `thinwire task check`

Importing this package imports no torch. The public names are those that a task's code uses. They are loaded at their
first use, so that the worker imports only `train/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.client.task import load_task
    from thinwire.client.train.context import Context
    from thinwire.client.train.evaluate import histogram
    from thinwire.client.train.partitions import held_out, own_part
    from thinwire.client.train.protocol import ClientInfo, Split
    from thinwire.client.train.task import LoadedTask

__all__ = ["ClientInfo", "Context", "LoadedTask", "Split", "held_out", "histogram", "load_task", "own_part"]

_WHERE = {
    "LoadedTask": "thinwire.client.train.task",
    "ClientInfo": "thinwire.client.train.protocol",
    "Context": "thinwire.client.train.context",
    "Split": "thinwire.client.train.protocol",
    "held_out": "thinwire.client.train.partitions",
    "histogram": "thinwire.client.train.evaluate",
    "load_task": "thinwire.client.task",
    "own_part": "thinwire.client.train.partitions",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.client' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
