"""The threads of a client in a secure round: phases are answered while it trains, and a withdrawal ends every wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fleet_words import polled
from tests.support.secure_clients import SecureClients, message_of, name_of, secure_identity
from tests.support.small_task import cross_entropy, linear
from tests.support.transport_doubles import place
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.fleet import ClientConnected, Envelope, Fleet, Link
from thinwire.core.statedir import private_folder
from thinwire.core.types import Failure, PhaseReply, ReplyHeader
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.store import FileSpool
from thinwire.transport.protocol.http import INLINE_BYTES

WIDTH = 50_000  # of a model whose masked vector is larger than an inline part
LAST = name_of(3)  # the client that runs in threads of its own; the others are handlers


class Threads:
    """Three handlers and one whole client in one round; `go` lets the client's training continue."""

    def __init__(self, folder: Path, fleet: Fleet, link: Link, model: Any = linear) -> None:
        self.go, self.trains, self.stop = threading.Event(), threading.Event(), threading.Event()
        self.fleet, self.said, self.code = fleet, list[str](), list[int]()
        self.replies = list[PhaseReply | ReplyHeader]()
        self.clients, identity = SecureClients(folder, functions={"model": model}), secure_identity(3)

        def loss(model: Any, batch: Any) -> Any:
            self.trains.set()
            assert self.go.wait(60)
            return cross_entropy(model, batch)

        admission, home = AdmissionController(carries=identity.carries), private_folder(folder / "threads")
        task = self.clients.task(3, loss=loss)

        def run() -> None:
            device = Device(ClientInfo(LAST), home, admission, identity)
            self.code.append(serve(link, [task], device, self.stop, say=self.said.append))

        self.thread = threading.Thread(target=run)
        self.thread.start()
        connected = polled(self.fleet, ClientConnected)
        assert set(connected.hello.secure) == identity.carries, "else no secure plan selects it"

    def send(self, delivery: Any) -> None:
        self.fleet.send([Envelope(LAST, delivery.assignment, delivery.bundle)])

    def end(self) -> None:
        self.go.set()
        self.stop.set()
        self.thread.join(30)
        assert self.code == [0]

    def advertised(self) -> dict[str, bytes]:
        """Open a round, and return the requests of the phase share."""
        self.clients.open(away=[LAST])
        self.send(self.clients.assignment(LAST))
        return self.received(polled(self.fleet, PhaseReply))

    def received(self, reply: Any) -> dict[str, bytes]:
        """Give the client's message to the aggregator's side, close the phase, and return the next requests."""
        clients = self.clients
        if isinstance(reply, ReplyHeader):
            clients.headers[LAST] = reply
            clients.bodies[LAST] = b"".join(map(bytes, self.fleet.open(reply.update_id)))
            clients.server.receive(LAST)
        else:
            clients.server.receive(LAST, message_of(reply))
        self.replies.append(reply)
        return clients.server.close()

    def round(self) -> None:
        """Play a whole round; training continues when the phase share is answered."""
        clients, self.replies = self.clients, []
        requests = self.advertised()
        assert self.trains.wait(60)
        for phase in ("share", "masked", "agree", "unmask"):
            for name, request in requests.items():
                if name == LAST:
                    self.send(clients.request(name, phase, request))
                elif phase == "masked":
                    assert clients.phase(name, phase, request) is None
                    clients.finish(name)
                    clients.server.receive(name)
                else:
                    clients.server.receive(name, message_of(clients.phase(name, phase, request)))
            if phase == "masked":
                self.go.set()  # not before: what share was answered by had to be sent while training waited
            requests = self.received(polled(self.fleet, ReplyHeader if phase == "masked" else PhaseReply))


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[Threads]:
    fleet = LocalFleet(FileSpool(tmp_path / "spool"))
    made = Threads(tmp_path, fleet, LocalLink(fleet, LAST, downloads=private_folder(tmp_path / "downloads")))
    yield made
    made.end()


def test_a_phase_is_answered_while_training_runs_and_the_update_is_in_the_sum(threads: Threads) -> None:
    threads.round()
    mean, scalars = threads.clients.sum()
    assert (scalars, bool(np.abs(mean).max() > 0)) == ({"weight": 4}, True)


def wide() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 3))


@pytest.mark.parametrize(("model", "requests"), [(linear, 6), (wide, 8)])
def test_over_the_device_api_the_phases_take_seven_requests_of_a_client(
    tmp_path: Path, model: Any, requests: int
) -> None:
    """Five messages and a poll; then also one upload of a masked vector above 256 KiB, and one download of a model."""
    with place(tmp_path) as here:
        threads = Threads(tmp_path, here.fleet, here.link(LAST), model=model)
        updates = list[ReplyHeader]()
        for _ in range(2):
            threads.round()
            assert threads.clients.sum()[1] == {"weight": 4}
            updates += [reply for reply in threads.replies if isinstance(reply, ReplyHeader)]
        threads.end()
    _, last = updates  # from one masked update to the next, all five phases are counted
    assert (last.payload_bytes > INLINE_BYTES) == (model is wide)
    assert last.transfer is not None
    assert 5 <= last.transfer.requests <= requests


def test_a_round_that_is_withdrawn_ends_the_wait_for_its_seed(threads: Threads) -> None:
    threads.go.set()
    requests = threads.advertised()
    threads.send(threads.clients.request(LAST, "share", requests[LAST]))
    polled(threads.fleet, PhaseReply)
    threads.fleet.cancel([threads.clients.assignment(LAST).assignment.assignment_id])
    threads.round()
    assert threads.clients.sum()[1] == {"weight": 4}
    assert "round 1: withdrawn by the aggregator" in threads.said


def test_a_client_that_leaves_says_why_while_it_trains_and_trains_no_more(threads: Threads) -> None:
    requests = threads.advertised()
    assert threads.trains.wait(60)
    threads.send(threads.clients.request(LAST, "share", requests[LAST][:-1]))
    failure = polled(threads.fleet, Failure)
    assert (failure.kind, failure.text) == ("failed", "message")
    assert failure.assignment_id == threads.clients.assignment(LAST).assignment.assignment_id
    threads.go.set()
    threads.round()
    assert threads.clients.sum()[1] == {"weight": 4}
    assert not [line for line in threads.said if line.startswith("round 1: sent")]


def test_a_client_whose_process_ends_while_it_waits_for_the_seed_ends_at_once(threads: Threads) -> None:
    threads.go.set()
    requests = threads.advertised()
    threads.send(threads.clients.request(LAST, "share", requests[LAST]))
    polled(threads.fleet, PhaseReply)  # `end` of the fixture joins the thread


def test_a_phase_of_a_task_that_is_not_here_fails(threads: Threads) -> None:
    threads.clients.number = 1
    delivery = threads.clients.request(LAST, "share", b"")
    threads.send(replace(delivery, assignment=replace(delivery.assignment, task="other")))
    failure = polled(threads.fleet, Failure)
    assert (failure.kind, failure.assignment_id) == ("task-missing", delivery.assignment.assignment_id)
