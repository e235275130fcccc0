"""`thinwire` as it is, but an aggregator that it starts writes a line for each request of a device to $COUNTED.

A line is the device and the route. Behind a request that was answered with an assignment to train, a second line has
the assignment's id: the requests of a device from there to its next assignment belong to that round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from thinwire.cli.main import main
from thinwire.transport.server.app import DeviceApi, Request
from thinwire.transport.server.assignments import PullRoute

FIRST = "train"


def requests_of_rounds(counted: str, device: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of a round and the routes that a device requested in it.

    The request that is answered with the assignment to train is the round's first.
    """
    number, routes = 0, list[str]()
    for line in counted.splitlines():
        name, what, *more = line.split()
        if name != device:
            continue
        if what != FIRST:
            routes.append(what)
            continue
        yield number, routes[:-1]
        number, routes = int(more[0].rsplit(".", 2)[1]), routes[-1:]
    yield number, routes


def _write(*words: str) -> None:
    with open(os.environ["COUNTED"], "a") as file:
        file.write(" ".join(words) + "\n")


def count() -> None:
    """Have every request of a device noted."""
    serve, answer = DeviceApi._serve, PullRoute._answer

    async def served(self: DeviceApi, request: Request) -> None:
        if request.admitted.row is not None:
            _write(request.row.name, request.route)
        await serve(self, request)

    async def answered(self: PullRoute, request: Request, connection: Any, outstanding: Any, withdrawn: Any) -> None:
        if outstanding is not None and outstanding.envelope.assignment.kind == "train":
            _write(request.row.name, FIRST, outstanding.envelope.assignment.assignment_id)
        await answer(self, request, connection, outstanding, withdrawn)

    DeviceApi._serve, PullRoute._answer = served, answered  # type: ignore[method-assign]


if __name__ == "__main__":
    count()
    sys.exit(main())
