"""A writer that is killed: `python -m tests.support.dying DATABASE` reads numbers and dies at that step of its work.

For each number n a child records one round after another in one run and sends itself SIGKILL at its n-th step; a
step is a statement, or the moment before or after a commit. One process with children, because Python's start
takes longer than all the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from typing import Any

from sqlalchemy import event

from tests.support.store_story import DEVICES, accepted, closed, header, opened
from thinwire.core.events import UpdateAggregated
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved
from thinwire.store import Store


def main(path: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _work(path, int(line))
        _, status = os.waitpid(child, 0)
        print(f"{signal.Signals(os.WTERMSIG(status)).name} {line.strip()}", flush=True)


def _work(path: str, steps: int) -> None:
    store, left = Store.open(path), iter(range(steps))

    def step(*_: Any) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = store._database.engine
    event.listen(engine, "before_cursor_execute", step)
    event.listen(engine, "commit", step)
    run = store.run("latest")
    for number in count(len(store.rounds(run.run_id)) + 1):
        _round(store, run.run_id, number)
        step()


def _round(store: Store, run_id: str, number: int) -> None:
    reserved = PrivacyReserved(10.0 * number, number, "ward", "{}", list(DEVICES))
    store.record(run_id, [*opened(run_id, number), reserved])
    aggregated = [header(run_id, number, device) for device in DEVICES]
    for reply in aggregated:
        store.record(run_id, [accepted(reply, number), UpdateAggregated(15.0, number, str(reply.update_id), 0.1)])
    end = closed(number, [str(reply.update_id) for reply in aggregated])
    store.record(run_id, [end, PrivacyCommitted(20.0, number, "ab" * 32)])


if __name__ == "__main__":
    main(sys.argv[1])
