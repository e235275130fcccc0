"""A process that works for simulated clients until the one that started it is done with it or gone."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection


def main(connection: Connection, lifeline: int) -> None:
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    spec, crowd, path = connection.recv()
    sys.path += [folder for folder in path if folder not in sys.path]

    from thinwire.client.bench import Here
    from thinwire.client.compute.bench import use_threads
    from thinwire.client.task import load_task
    from thinwire.simulation.sessions import Sessions

    bench = Here(load_task(spec), crowd.site.device)
    use_threads(0, bench.layout.size)
    sessions = Sessions(crowd, bench, shared=True)
    while True:
        try:
            index, delivery, mine = connection.recv()
        except EOFError:
            return
        if not mine:  # another process has worked for this client since
            sessions.sleep(index)
        connection.send(((index, delivery.ask.ask_id), sessions.answer(index, delivery)))


def _end_with(lifeline: int) -> None:
    """Whatever is going on here: nobody waits for it."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
