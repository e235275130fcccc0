"""The threads of a client in a secure round: phases are answered while it trains, and a withdrawal ends every wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fleet_words import polled
from tests.support.secure_clients import SecureClients, message_of, name_of, secure_identity
from tests.support.small_task import cross_entropy
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import serve
from thinwire.core.fleet import ClientConnected, Envelope
from thinwire.core.statedir import private_folder
from thinwire.core.types import PhaseReply, ReplyHeader
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.store import FileSpool

LAST = name_of(3)  # the client that runs in threads of its own; the others are handlers


class Threads:
    """Three handlers and one whole client in one round; `go` lets the client's training continue."""

    def __init__(self, folder: Path) -> None:
        self.go, self.trains, self.stop = threading.Event(), threading.Event(), threading.Event()
        self.fleet, self.said, self.code = LocalFleet(FileSpool(folder / "spool")), list[str](), list[int]()
        self.clients = SecureClients(folder)
        downloads, identity = private_folder(folder / "downloads"), secure_identity(3)

        def loss(model: Any, batch: Any) -> Any:
            self.trains.set()
            assert self.go.wait(60)
            return cross_entropy(model, batch)

        link = LocalLink(self.fleet, LAST, downloads=downloads)
        gate, home = AdmissionController(carries=identity.carries), private_folder(folder / "threads")
        task = self.clients.task(3, loss=loss)

        def run() -> None:
            self.code.append(
                serve(link, [task], home, LAST, say=self.said.append, stop=self.stop, gate=gate, secure=identity)
            )

        self.thread = threading.Thread(target=run)
        self.thread.start()
        polled(self.fleet, ClientConnected)

    def send(self, delivery: Any) -> None:
        self.fleet.send([Envelope(LAST, delivery.assignment, delivery.bundle)])

    def end(self) -> None:
        self.go.set()
        self.stop.set()
        self.thread.join(30)
        assert self.code == [0]


@pytest.fixture
def threads(tmp_path):
    made = Threads(tmp_path)
    yield made
    made.end()


def advertised(threads: Threads) -> dict[str, bytes]:
    """Open a round, and return the requests of the phase share."""
    clients = threads.clients
    clients.open(away=[LAST])
    threads.send(clients.assignment(LAST))
    clients.server.receive(LAST, message_of(polled(threads.fleet, PhaseReply)))
    return clients.server.close()


def test_a_phase_is_answered_while_training_runs_and_the_update_is_in_the_sum(threads):
    clients, fleet = threads.clients, threads.fleet
    requests = advertised(threads)
    assert threads.trains.wait(60)
    for phase in ("share", "masked", "agree", "unmask"):
        for name, request in requests.items():
            if name == LAST:
                threads.send(clients.request(name, phase, request))
            elif phase == "masked":
                assert clients.phase(name, phase, request) is None
                clients.finish(name)
                clients.server.receive(name)
            else:
                clients.server.receive(name, message_of(clients.phase(name, phase, request)))
        if phase == "masked":
            threads.go.set()  # not before: what share was answered by had to be sent while training waited
            header = polled(fleet, ReplyHeader)
            clients.replies[LAST], clients.bodies[LAST] = (
                header,
                b"".join(bytes(p) for p in fleet.open(header.update_id)),
            )
            clients.server.receive(LAST)
        else:
            clients.server.receive(LAST, message_of(polled(fleet, PhaseReply)))
        requests = clients.server.close()
    mean, scalars = clients.sum()
    assert (scalars, bool(np.abs(mean).max() > 0)) == ({"weight": 4}, True)
