"""An aggregator that demands too much of a device: it is told so, and the next honest assignment is done."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.callers import tls_place
from tests.support.fleet_words import answer, envelope, hello, polled, pulled, until
from tests.support.small_task import Aggregator, plan_of, task_of
from tests.support.transport_doubles import Place, place
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve, wanted
from thinwire.client.executor import InProcessExecutor
from thinwire.client.policy import Policy
from thinwire.client.run_state import ClientRunState, Entry, RunFolder, WriteBehindRunFolder
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.errors import BadPayload, NotWritten, Unreachable
from thinwire.core.fleet import MAX_TENSORS, ClientConnected, Delivery, Envelope, TaskReport
from thinwire.core.layout import Layout
from thinwire.core.serialization import assignment_from_bytes, assignment_to_bytes
from thinwire.core.types import Failure, Part, Reply, ReplyHeader, Work
from thinwire.store import FileSpool
from thinwire.transport.device.link import MAX_IN_FLIGHT
from thinwire.transport.device.transfers import Incoming
from thinwire.transport.protocol import registration

Answered: Any = Reply
HUGE = 2_800_000_000
LITTLE = 60_000  # bytes: a hello, an assignment and their TLS handshake


class Attacked:
    """A device that serves in a thread, and an aggregator whose assignments are written by hand."""

    def __init__(self, here: Place, policy: Policy, plan: str = "") -> None:
        self.here, self.said, self.stop = here, list[str](), threading.Event()
        task = InProcessExecutor(task_of())
        self.honest, self.folder = (
            Aggregator(here.folder / "assignments", task.task, plan_of(plan)),
            here.folder / "device",
        )
        self.folder.mkdir()
        self.admission = admission = AdmissionController(policy, self.folder)
        link = here.link("pi-1", is_wanted=wanted(admission, [task]), min_free=lambda: admission.min_free_bytes)
        self.downloads = here.folder / "clients" / "pi-1" / "downloads"
        served = (link, [task], Device(ClientInfo("pi-1"), self.folder, admission), self.stop)
        self.thread = threading.Thread(target=serve, args=served, kwargs={"say": self.said.append})
        self.thread.start()
        polled(here.fleet, ClientConnected)

    def assign(self, delivery: Delivery, *parts: Part, **changed: Any) -> Reply:
        """What comes back for an assignment with these parts, which lie in a file of holes."""
        assignment, bundle = replace(delivery.assignment, **changed), delivery.bundle
        if parts:
            assignment, bundle = replace(assignment, parts=parts), self.here.folder / "bundle"
            with bundle.open("wb") as file:
                file.truncate(sum(part.length for part in parts))
        self.here.fleet.send([Envelope("pi-1", assignment, bundle)])
        answered: Reply = polled(
            self.here.fleet, Answered, lambda arrival: arrival.assignment_id == assignment.assignment_id
        )
        return answered

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(params=["plain", "tls"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    spool = {"spool": lambda: FileSpool(tmp_path / "spool")}
    with tls_place(tmp_path) if request.param == "tls" else place(tmp_path, **spool) as made:
        yield made


@contextlib.contextmanager
def attacked(here: Place, policy: Policy | None = None, plan: str = "") -> Iterator[Attacked]:
    made = Attacked(here, policy or Policy(), plan)
    try:
        yield made
    finally:
        made.close()


def zeros(name: str, length: int) -> Part:
    return Part(name, length, "0" * 64)


def refused(answered: Reply) -> tuple[str, str]:
    assert isinstance(answered, Failure), answered
    assert answered.transfer is not None
    assert (answered.transfer.sent_bytes or 0) < LITTLE, "some of it was fetched"
    return answered.kind, answered.text


def test_a_model_of_gigabytes_is_refused_before_its_first_byte(here: Place) -> None:
    with attacked(here) as device:
        honest = device.honest.assign
        kind, text = refused(device.assign(honest(1), zeros("full/0", HUGE)))
        assert (kind, text) == (
            "protocol", "part full/0 of 2,800,000,000 bytes is announced; this layout needs at most 84"
        )  # fmt: skip
        assert not list(device.downloads.iterdir())
        many = [zeros(f"full/{n}", HUGE) for n in range(3)]
        assert refused(device.assign(honest(2), *many, kind="evaluate"))[0] == "protocol"
        assert refused(device.assign(honest(3), zeros("buffers", HUGE)))[0] == "protocol", "this model has none"
        assert refused(device.assign(honest(4), zeros("1/0", HUGE)))[0] == "protocol", "its downlink sends no changes"
        assert refused(device.assign(honest(5), zeros("full/0", HUGE), kind="init"))[0] == "protocol"
        assert refused(device.assign(honest(6), zeros("full/0", HUGE), layout_digest="0" * 64))[0] == "layout-mismatch"
        assert refused(device.assign(honest(7), zeros("full/0", HUGE), task="other"))[0] == "task-missing"
        assert isinstance(device.assign(honest(8)), ReplyHeader)


def test_a_million_million_steps_end_at_the_owners_limit(here: Place) -> None:
    with attacked(here, Policy(max_assignment_minutes=0.003)) as device:
        failure = device.assign(device.honest.assign(1, work=Work(10**12, 8)))
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.text.partition(":")[0]) == ("declined", "max_assignment_minutes")
        device.admission.set_policy(Policy())
        assert isinstance(device.assign(device.honest.assign(2)), ReplyHeader)


def test_one_assignment_that_is_withdrawn_each_time_is_worked_on_as_often_as_its_owner_allows(here: Place) -> None:
    with attacked(here, Policy(rounds_a_day=2)) as device:
        endless, said = device.honest.assign(1, work=Work(10**12, 8)), device.said
        for times in (1, 2):
            begun = sum(" steps" in line for line in said)
            here.fleet.send([Envelope("pi-1", endless.assignment, endless.bundle)])
            until(lambda begun=begun: sum(" steps" in line for line in said) > begun)  # type: ignore[misc]  # a default
            here.fleet.cancel([endless.assignment.assignment_id])
            until(lambda times=times: sum("withdrawn" in line for line in said) == times)  # type: ignore[misc]  # a default
        told = device.assign(endless)
        assert isinstance(told, Failure)
        assert told.text.startswith("rounds_a_day: ")


def test_so_are_batches_that_no_memory_holds_and_plans_with_more_than_a_device_counts(here: Place) -> None:
    with attacked(here) as device:
        plan, assignment = device.honest.plan.to_json(), device.honest.assign
        failure = device.assign(assignment(1, work=Work(3, 10**12)))
        assert isinstance(failure, Failure)
        assert failure.kind == "protocol"
        for number, key in enumerate(("batch", "accumulate"), 2):
            wide = {**plan, "local": {**plan["local"], key: 10**12}}
            failure = device.assign(assignment(number, plan=wide))
            assert isinstance(failure, Failure)
            assert (failure.kind, failure.text.partition(":")[0], key in failure.text) == ("declined", "plan", True)
        assert isinstance(device.assign(assignment(9)), ReplyHeader)


def test_a_device_tells_its_layout_and_an_aggregator_takes_no_more_of_it_than_is_read(here: Place) -> None:
    link, text = here.link("pi-1"), Layout.of({"w": (2, 3)}).text
    said = replace(hello("pi-1"), tasks=(TaskReport("small", tensors=text),))
    link.hello(said)
    assert polled(here.fleet, ClientConnected).hello.tasks == said.tasks
    for told, taken in (("[" * MAX_TENSORS, "[" * MAX_TENSORS), ("[" * (MAX_TENSORS + 1), ""), ("\n", "")):
        read = registration.hello_from_bytes(
            registration.to_bytes(replace(said, tasks=(TaskReport("small", tensors=told),)))
        )
        assert read.tasks == (TaskReport("small", tensors=taken),)


def test_assignments_without_end_are_not_taken_in_while_the_first_ones_wait(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    here.fleet.send([envelope("pi-1", f"assignment-{n}") for n in range(MAX_IN_FLIGHT + 1)])
    for n in range(MAX_IN_FLIGHT):
        assert pulled(link).assignment.assignment_id == f"assignment-{n}"
    with pytest.raises(Unreachable, match="more than 64 assignments at once"):
        link.pull(5.0)
    link.push(Failure("task-error", "", "assignment-0"))
    assert pulled(link).assignment.assignment_id == f"assignment-{MAX_IN_FLIGHT}"


@pytest.mark.parametrize(
    ("field", "value"),
    [("assignment_id", "a" * 1025), ("run", "r" * 10**6), ("base_digest", "x\n"), ("round", -1), ("deadline_s", 1e999),
     ("base_version", 10**30), ("deadline_s", -1.0)],
)  # fmt: skip
def test_an_assignment_whose_names_and_numbers_cannot_be_is_not_read(field: str, value: Any) -> None:
    raw = {**json.loads(assignment_to_bytes(envelope("pi-1", "assignment-1").assignment)), field: value}
    with pytest.raises(BadPayload):
        assignment_from_bytes(json.dumps(raw).encode())


def test_a_disk_that_would_be_too_full_takes_no_model_and_no_answer(here: Place) -> None:
    """Its owner keeps more free than there is: said with the key, and over as soon as there is room."""
    with attacked(here, Policy(min_free_disk_mb=2**40)) as device:
        kind, text = refused(device.assign(device.honest.assign(1)))
        assert kind == "disk"
        assert text.startswith(f"min_free_disk_mb = {2**40}: ")
        device.admission.set_policy(Policy(min_free_disk_mb=0))
        assert isinstance(device.assign(device.honest.assign(2)), ReplyHeader)


def test_a_download_that_would_fill_the_disk_is_not_begun(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    incoming = Incoming(tmp_path / "downloads", lambda: free - 10**9)
    with pytest.raises(NotWritten, match="min_free_disk_mb"):
        incoming.fetch([zeros("full/0", HUGE)], lambda start, tag: pytest.fail("it was requested"))
    assert not list((tmp_path / "downloads").iterdir())


@pytest.mark.parametrize("folder", [RunFolder, WriteBehindRunFolder])
def test_an_answer_that_would_fill_the_disk_is_not_kept_and_what_makes_room_is(tmp_path: Path, folder: Any) -> None:
    min_free, data = [0], b"frames"
    kept = folder(tmp_path, min_free=lambda: min_free[0])
    header = answer("pi-1", "a-1", 1, data)
    one, none = ClientRunState(1, outbox=(Entry(header, 1, "1.parts"),)), ClientRunState(1)
    write = kept.hold if folder is WriteBehindRunFolder else kept.commit
    write(one, {"1.parts": data})
    two = ClientRunState(2, outbox=(*one.outbox, Entry(answer("pi-1", "a-2", 2, data * 1000), 2, "2.parts")))
    min_free[0] = 2**60
    with pytest.raises(NotWritten, match="min_free_disk_mb"):
        write(two, {"2.parts": data * 1000})
    assert not (tmp_path / "2.parts").exists()
    kept.commit_smaller(none)
    assert not (tmp_path / "1.parts").exists()


@pytest.mark.parametrize("folder", [RunFolder, WriteBehindRunFolder])
def test_a_residual_that_would_fill_the_disk_is_refused_before_anything_is_written(
    tmp_path: Path, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, free = folder(tmp_path / "runs" / "small-1", min_free=lambda: 10**6), [10**6 + 3999]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    write = kept.hold if folder is WriteBehindRunFolder else kept.commit
    with pytest.raises(NotWritten, match="min_free_disk_mb"):
        write(ClientRunState(1, residual=np.ones(1000, np.float32)))
    assert not (tmp_path / "runs").exists()
    free[0] += 1
    write(ClientRunState(1, residual=np.ones(1000, np.float32)))
    assert (tmp_path / "runs" / "small-1").exists()


def test_what_replaces_a_residual_fits_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are on the disk until the commit; a state that is smaller than the one before is always written."""
    kept, free = RunFolder(tmp_path, min_free=lambda: 10**6), [10**8]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    one = ClientRunState(1, residual=np.ones(1000, np.float32))
    kept.commit(one)
    files = {path.name for path in tmp_path.iterdir()}
    free[0] = 10**6 + 5000
    with pytest.raises(NotWritten, match="min_free_disk_mb"):
        kept.commit(ClientRunState(2, residual=np.ones(1000, np.float32), buffers=np.ones(1000, np.float32)))
    assert {path.name for path in tmp_path.iterdir()} == files
    kept.commit(ClientRunState(2, residual=one.residual, buffers=np.ones(1000, np.float32)))
    free[0] = 0
    kept.commit(ClientRunState(3, residual=np.zeros(1000, np.float32)))
    assert kept.load()[0].sequence == 3
