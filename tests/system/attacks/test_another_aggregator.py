"""Another aggregator answers at the address of the one that a device worked for, with a run of the same id.

What the device made for the old run never leaves it, and nothing of that run goes into the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fleet_words import hello, polled
from tests.support.small_task import Aggregator, plan_of, task_of
from tests.support.transport_doubles import Place, place
from tests.system.attacks.places import attacked
from thinwire.client import agent
from thinwire.client.admission import AdmissionController
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.clock import RealClock
from thinwire.core.errors import NotOffered, Unreachable
from thinwire.core.fleet import ClientConnected, Delivery, Envelope
from thinwire.core.statedir import AggregatorHome, private_folder
from thinwire.core.types import Assignment, Failure, Part, ReplyHeader
from thinwire.server.run import drive
from thinwire.server.service import RunLimits
from thinwire.server.submit import FirstModel, submit
from thinwire.store import RunRow, Store
from thinwire.transport.device.connect import TlsConnection
from thinwire.transport.device.enroll import join
from thinwire.transport.device.http_client import Connection, FileRange, HttpRequest
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.protocol.http import INLINE_BYTES, PUSH, inflate, unblock
from thinwire.transport.protocol.signing import public_der

DEVICE, RUN, OLD = "pi-1", "small-1", "a" * 16
PATIENCE_S = 60.0
PLAIN_AND_TLS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
PLAN = plan_of("[cohort]\nwait_for = 1", run="rounds = 1")


class Sent:
    """All that a device sends from now on, as it is before TLS."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.bodies, self.headers = list[bytes](), list[bytes]()
        send = Connection._send

        def recorded(connection: Connection, call: HttpRequest, line: TlsConnection) -> bool:
            body = call.body
            if isinstance(body, FileRange):
                body = body.path.read_bytes()[body.start : body.start + body.length]
            self.bodies.append(body)
            if call.target == PUSH:
                self.headers.append(inflate(unblock(body)[0], 2**20))
            return send(connection, call, line)

        patched.setattr(Connection, "_send", recorded)

    def require_nothing_of(self, update: bytes) -> None:
        assert len(update) > 32
        assert not any(update[at : at + 32] in body for body in self.bodies for at in range(0, len(update) - 32, 16))
        assert not any(OLD.encode() in header for header in self.headers)


class Device:
    """A folder that outlives the processes of its device, and links to whoever is at the address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.task, self.said = private_folder(folder), task_of(), list[str]()
        self.der = public_der(device_key(folder).public_key())

    def link(self, here: Place) -> HttpsLink:
        if here.authority is not None and Trust.load(self.folder) is None:
            join(here.url, here.invite(), device_key(self.folder), DEVICE, {}).trust.save(self.folder)
        return HttpsLink(here.url, device_key(self.folder), DEVICE, self.folder, Trust.load(self.folder))

    def trained(self, here: Place, assignments: Path) -> tuple[HttpsLink, Delivery, ReplyHeader, Path]:
        """Be requested an update and commit it; its process did not come to send it."""
        link, aggregator = self.link(here), Aggregator(assignments, self.task, PLAN)
        link.hello(hello(DEVICE))
        polled(here.fleet, ClientConnected)
        assigned = aggregator.assign(identity=OLD, assignment_id=f"{RUN}.1.{DEVICE}")
        here.roster.identities = {RUN: OLD}
        here.fleet.send([Envelope(DEVICE, assigned.assignment, assigned.bundle)])
        delivery = link.pull(PATIENCE_S)
        assert delivery is not None
        header, body = self.handler().handle(delivery, lambda: False, self.said.append)
        assert isinstance(header, ReplyHeader)
        assert body is not None
        return link, delivery, header, body

    def handler(self) -> AssignmentHandler:
        return AssignmentHandler(self.task, self.folder, ClientInfo(DEVICE))

    @contextlib.contextmanager
    def running(self, here: Place) -> Iterator[None]:
        stop = threading.Event()
        link = self.link(here)
        device = agent.Device(ClientInfo(DEVICE), self.folder, AdmissionController(folder=self.folder))
        thread = threading.Thread(target=lambda: agent.serve(link, [self.task], device, stop, say=self.said.append))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def run_on_a_new_aggregator(root: Path, device: Device, tls: bool, port: int = 0, ca: Path | None = None) -> RunRow:
    """A whole run of a new state directory, which has the id that each first run has."""
    home = AggregatorHome.under(root)
    if ca is not None:
        shutil.copytree(ca, home.root / "ca")
    with (
        Store.open(home.database) as store,
        attacked(home.root, tls=tls, port=port, limits=RunLimits(store)) as here,
    ):
        if tls and Trust.load(device.folder) is not None:
            store.roster.add(DEVICE, device.der, "manual")
        executor = InProcessExecutor(device.task, "cpu")
        layout = executor.layout
        first = np.full(layout.size, 0.25, np.float32)
        run_id = submit(store, home, PLAN, FirstModel(layout, executor.report(), first, np.zeros(0, np.float32)))
        assert run_id == RUN
        with device.running(here):
            return drive(run_id, store=store, fleet=here.fleet, home=home, clock=RealClock())


def port_of(here: Place) -> int:
    return int(here.fleet.address.rpartition(":")[2])


@PLAIN_AND_TLS
def test_what_was_made_for_the_old_run_is_not_sent_to_the_new_one_and_not_aggregated(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path / "device")
    with place(tmp_path, tls=tls) as old:
        link, _, _, body = device.trained(old, tmp_path / "assignments")
        update, port = body.read_bytes(), port_of(old)
        link.close()
    sent = Sent(monkeypatch)
    row = run_on_a_new_aggregator(tmp_path / "new", device, tls, port, tmp_path / "ca" if tls else None)
    sent.require_nothing_of(update)
    refused = [line for line in device.said if f"what was made for {RUN} is not sent" in line]
    assert len(refused) == 1
    assert "thinwire client leave deletes it" in refused[0]
    clean = run_on_a_new_aggregator(tmp_path / "clean", Device(tmp_path / "another"), tls)
    assert (row.status, row.aggregated_count, row.model_digest) == ("done", 1, clean.model_digest)


@pytest.mark.parametrize("size", [900, INLINE_BYTES + 1])
@PLAIN_AND_TLS
def test_an_aggregator_that_is_replaced_while_a_device_trains_gets_no_update_and_no_failure(
    tmp_path: Path, tls: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path / "device")
    with place(tmp_path, tls=tls) as old:
        link, delivery, header, body = device.trained(old, tmp_path / "assignments")
        port = port_of(old)
    sent, update = Sent(monkeypatch), np.random.default_rng(1).bytes(size)
    body.write_bytes(update)
    header = replace(header, parts=(replace(header.parts[0], length=size, sha256=hashlib.sha256(update).hexdigest()),))
    (tmp_path / "new").mkdir()
    if tls:
        shutil.copytree(tmp_path / "ca", tmp_path / "new" / "ca")
    with place(tmp_path / "new", tls=tls, port=port) as new:
        new.roster.enrol(DEVICE, link.fingerprint, device.der, "manual")
        new.roster.identities = {RUN: "b" * 16}
        for reply, bundle in (
            (header, body),
            (Failure("task-error", "", delivery.assignment.assignment_id, DEVICE, identity=OLD), None),
        ):
            with pytest.raises(NotOffered, match="another aggregator's"):
                link.push(reply, bundle)
        sent.require_nothing_of(update)
        assert not sent.headers
        assert delivery.assignment.assignment_id in link.cancelled(), "nobody waits for it any more"
        polled(new.fleet, ClientConnected)
        assigned = Assignment(delivery.assignment.assignment_id, RUN, "small", "train", {}, round=1, identity="b" * 16)
        new.fleet.send([Envelope(DEVICE, assigned)])
        given = link.pull(PATIENCE_S)
        assert given is not None, (
            "the assignment of the same id is the new aggregator's: the device does not hold it yet"
        )
        assert given.assignment.identity == "b" * 16
        link.push(Failure("task-error", "", assigned.assignment_id, DEVICE, identity="b" * 16))
        assert polled(new.fleet, Failure).kind == "task-error"
        link.close()


def test_an_aggregator_with_another_ca_hears_nothing_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tmp_path / "device")
    with place(tmp_path, tls=True) as old:
        link, _, header, body = device.trained(old, tmp_path / "assignments")
        port = port_of(old)
    sent = Sent(monkeypatch)
    (tmp_path / "new").mkdir()
    with place(tmp_path / "new", tls=True, port=port) as new:
        new.roster.enrol(DEVICE, link.fingerprint, device.der, "manual")
        with pytest.raises(Unreachable, match="shows a certificate that this device does not trust"):
            link.push(header, body)
        link.close()
    assert not sent.bodies


@PLAIN_AND_TLS
def test_the_same_aggregator_gets_after_a_restart_what_a_device_made_for_its_run(tmp_path: Path, tls: bool) -> None:
    device = Device(tmp_path / "device")
    with place(tmp_path, tls=tls) as here:
        link, _, header, body = device.trained(here, tmp_path / "assignments")
        here.restart()
        link.push(header, body)
        assert [arrived.identity for arrived in here.spool.headers()] == [OLD]
        link.close()


@PLAIN_AND_TLS
def test_an_aggregator_that_stays_is_said_hello_to_once(tmp_path: Path, tls: bool) -> None:
    """What tells one aggregator from another costs nothing where there is one, with large models too."""
    device = Device(tmp_path / "device")
    model = tmp_path / "model"
    model.write_bytes(bytes(INLINE_BYTES + 1))
    part = Part("full/0", INLINE_BYTES + 1, hashlib.sha256(model.read_bytes()).hexdigest())
    with place(tmp_path, tls=tls) as here:
        link, _, header, body = device.trained(here, tmp_path / "assignments")
        before = len(here.roster.hellos)
        here.fleet.send(
            [Envelope(DEVICE, Assignment(f"{RUN}.2.{DEVICE}", RUN, "small", "train", {}, parts=(part,)), model)]
        )
        assert link.pull(PATIENCE_S) is not None
        link.push(header, body)
        assert len(here.roster.hellos) == before
        link.close()
