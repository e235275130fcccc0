"""The service: joins, answers, tries again, and ends with a code that says why."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fleet_words import polled, until
from tests.support.small_task import RUN, Aggregator, cross_entropy, normed, plan_of, task_of
from tests.support.transport_doubles import place
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve, versions
from thinwire.client.assignment_context import UplinkTimeEstimator
from thinwire.client.calls import BackgroundSender, sent_line
from thinwire.client.handler import AssignmentHandler
from thinwire.client.personal_files import whole_model
from thinwire.client.policy import Policy
from thinwire.client.run_state import FORMAT
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.errors import NotAccepted, ReplyUnreadable
from thinwire.core.fleet import ClientConnected, ClientDisconnected, Delivery, Envelope
from thinwire.core.protocol import without_facts
from thinwire.core.statedir import private_folder
from thinwire.core.types import Assignment, Failure, Part, ReplyHeader, SecureWork, Timings, UpdateId
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.store import FileSpool

DEVICE = "pi-01"


def device_in(folder: Path, policy: Policy | None = None) -> Device:
    return Device(ClientInfo(DEVICE), folder, AdmissionController(policy, folder))


class Running:
    """A service in a thread of this process, and the fleet that it belongs to."""

    def __init__(self, folder: Path, **functions: Any) -> None:
        self.folder, self.task = folder, task_of(**functions)
        self.aggregator = Aggregator(folder / "assignments", self.task, plan_of())
        self.fleet = LocalFleet(FileSpool(folder / "spool"))
        self.stop, self.said, self.code = threading.Event(), list[str](), list[int]()
        self.threads = list[threading.Thread]()

    def start(self, policy: Policy | None = None, once: bool = False) -> threading.Thread:
        (self.folder / "downloads").mkdir(exist_ok=True)
        device = device_in(private_folder(self.folder / "device"), policy)
        link = LocalLink(self.fleet, DEVICE, downloads=self.folder / "downloads")

        def run() -> None:
            self.code.append(serve(link, [self.task], device, self.stop, say=self.said.append, once=once))

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)
        self.joined = polled(self.fleet, ClientConnected)
        return thread

    def send(self, *deliveries: Delivery) -> None:
        self.fleet.send([Envelope(DEVICE, delivery.assignment, delivery.bundle) for delivery in deliveries])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.stop.set()
    for thread in made.threads:
        thread.join(60)  # its folder is removed after the test


def test_a_service_keeps_the_whole_model_of_a_run_with_personal_layers(tmp_path: Path) -> None:
    running = Running(tmp_path, model=normed)
    running.aggregator = Aggregator(tmp_path / "assignments", running.task, plan_of('personal_layers = ["3.*"]'))
    thread = running.start()
    running.send(running.aggregator.assign(1))
    polled(running.fleet, ReplyHeader)
    running.stop.set()
    thread.join(60)
    found = whole_model(running.folder / "device", RUN)
    assert (set(found.tensors), found.missing) == (set(normed().state_dict()), [])


def test_assignments_are_answered_in_order_until_the_stop(running: Running) -> None:
    thread = running.start()
    first, second = running.aggregator.assign(1), running.aggregator.assign(2, outcomes=[(1, "aggregated")])
    running.send(first, second)
    headers = [polled(running.fleet, ReplyHeader) for _ in range(2)]
    assert [header.update_id.sequence for header in headers] == [1, 2]
    assert first.bundle is not None
    assert first.bundle.exists()  # the aggregator's own file
    running.stop.set()
    thread.join(60)
    assert running.code == [0]
    assert not list((running.folder / "downloads").iterdir())
    assert polled(running.fleet, ClientDisconnected).device == DEVICE
    assert running.said[:3] == ["connecting", "idle", f"works on {RUN}"]
    assert running.said.count(f"works on {RUN}") == 1, "until another run has an assignment"
    assert any(line.startswith("round 1: train") for line in running.said)
    assert any(line.startswith("round 2: sent") for line in running.said)


def test_who_is_stopped_in_the_middle_of_training_says_so_last(tmp_path: Path) -> None:
    begun = threading.Event()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        begun.set()
        return cross_entropy(model, batch)

    service = Running(tmp_path, loss=loss)
    service.stop = begun
    service.aggregator.steps = 10_000
    thread = service.start()
    service.send(service.aggregator.assign(1))
    thread.join(60)
    assert (service.code, service.said[-1]) == ([0], "stopping")


def test_a_device_that_is_renamed_while_it_waits_answers_by_its_new_name(tmp_path: Path) -> None:
    """A run that begins before anybody has heard of it selects the old one: that call is how the device hears of it."""
    task, stop, code = task_of(), threading.Event(), list[int]()
    assignments = Aggregator(tmp_path / "assignments", task, plan_of())
    with place(tmp_path) as here:
        link, folder = here.link(DEVICE), private_folder(tmp_path / "device")

        def answers() -> None:
            code.append(serve(link, [task], device_in(folder), stop))

        thread = threading.Thread(target=answers, daemon=True)
        thread.start()
        polled(here.fleet, ClientConnected)
        here.roster.devices = {"lab-1": replace(here.roster.devices[DEVICE], name="lab-1")}
        old, new = assignments.assign(1), assignments.assign(2)
        here.fleet.send([Envelope(DEVICE, old.assignment, old.bundle)])
        assert polled(here.fleet, ClientConnected).device == "lab-1"
        here.fleet.send([Envelope("lab-1", new.assignment, new.bundle)])
        assert polled(here.fleet, ReplyHeader).update_id == UpdateId(RUN, "lab-1", 1)
        stop.set()
        thread.join(60)
    assert code == [0]


def test_an_answer_that_was_refused_is_not_said_to_have_been_sent(running: Running, monkeypatch: pytest.MonkeyPatch):
    refused, push, measured = (
        NotAccepted("the aggregator does not take it", "too large"),
        LocalLink.push,
        list[object](),
    )

    def first_refused(link: LocalLink, reply: ReplyHeader, bundle: Path | None) -> None:
        if reply.update_id.sequence == 1:
            raise refused
        push(link, reply, bundle)

    monkeypatch.setattr(LocalLink, "push", first_refused)
    monkeypatch.setattr(
        UplinkTimeEstimator, "add_upload", lambda self, header, seconds: measured.append(header.update_id.sequence)
    )
    thread = running.start()
    running.send(running.aggregator.assign(1), running.aggregator.assign(2))
    assert polled(running.fleet, ReplyHeader).update_id.sequence == 2
    running.stop.set()
    thread.join(60)
    told = [line for line in running.said if "sent" in line or "accepted" in line or line.startswith("error")]
    assert told[:2] == [refused.text(), "round 1: its reply was not accepted"]
    assert [line[:13] for line in told[2:]] == ["round 2: sent"]
    assert measured == [2], "how long a refusal took is no upload's time"


def test_no_round_waits_for_an_answer_that_the_disk_has_lost(running: Running, monkeypatch: pytest.MonkeyPatch):
    push = LocalLink.push

    def first_lost(link: LocalLink, reply: ReplyHeader | Failure, bundle: Path | None) -> None:
        if isinstance(reply, ReplyHeader) and reply.update_id.sequence == 1:
            raise ReplyUnreadable("cannot read 1.parts", "Input/output error")
        push(link, reply, bundle)

    monkeypatch.setattr(LocalLink, "push", first_lost)
    running.start()
    running.send(running.aggregator.assign(1), running.aggregator.assign(2))
    failure = polled(running.fleet, Failure)
    assert (failure.kind, failure.assignment_id, failure.device) == ("disk", "a-1", DEVICE)
    header = polled(running.fleet, ReplyHeader)
    assert (header.update_id.sequence, header.lost) == (2, "damaged")


def test_a_run_begins_once_the_reply_of_the_run_that_it_may_displace_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, drained, begin = list[str](), BackgroundSender.drained, AssignmentHandler.begin

    def noted_drained(sender: BackgroundSender) -> bool:
        called.append("drained")
        return drained(sender)

    def noted_begin(handler: AssignmentHandler, delivery: Delivery, *given: Any) -> Any:
        called.append(delivery.assignment.run)
        return begin(handler, delivery, *given)

    monkeypatch.setattr(BackgroundSender, "drained", noted_drained)
    monkeypatch.setattr(AssignmentHandler, "begin", noted_begin)
    running = Running(tmp_path)
    running.aggregator.plan = plan_of("[local.overlap]\nmax_delay = 1")
    thread = running.start(Policy(max_runs=1))
    for number, run in ((1, "small-1"), (2, "small-1"), (1, "small-2")):
        running.send(running.aggregator.assign(number, run=run, assignment_id=f"{run}.{number}"))
        polled(running.fleet, ReplyHeader)
    running.stop.set()
    thread.join(60)
    assert called == ["drained", "small-1", "small-1", "drained", "small-2"]


def test_once_ends_with_the_run(running: Running) -> None:
    thread = running.start(once=True)
    running.send(running.aggregator.assign(1))
    polled(running.fleet, ReplyHeader)
    running.send(running.aggregator.assign(2, "stop", parts=()))
    thread.join(60)
    assert running.code == [0]
    assert f"{RUN} is over" in running.said


class MissesAnEnd(LocalLink):
    """A link whose stops are those of runs that ended while the device was offline."""

    def pull(self, wait_s: float) -> Delivery | None:
        delivery = super().pull(wait_s)
        return delivery and replace(delivery, missed=delivery.assignment.kind == "stop")


def test_the_end_of_a_run_before_its_time_does_not_end_a_once_process(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.client.test_service.LocalLink", MissesAnEnd)
    thread = running.start(once=True)
    running.send(running.aggregator.assign(9, "stop", parts=(), run="small-0"), running.aggregator.assign(1))
    polled(running.fleet, ReplyHeader)
    running.send(running.aggregator.assign(2, "stop", parts=()))
    thread.join(60)
    assert running.code == [0], "the end of the run that it took part in ends it"


def test_a_hello_names_the_runs_that_the_device_keeps_until_it_knows_that_they_are_over(running: Running) -> None:
    left, identity = running.aggregator.handler(running.folder / "device"), "a" * 16
    running.aggregator.answer(left, running.aggregator.assign(1, identity=identity))
    running.start()
    assert running.joined.hello.open_runs == {RUN: identity}
    running.send(running.aggregator.assign(2, "stop", parts=(), identity=identity))
    until(lambda: f"{RUN} is over" in running.said)
    assert left.runs.open_runs("small") == {}


def test_once_ends_at_the_stop_of_a_run_that_it_saw_and_was_never_drawn_in(running: Running) -> None:
    thread = running.start(once=True)
    running.send(running.aggregator.assign(1, "stop", parts=()))
    thread.join(60)
    assert running.code == [0]


def test_an_answer_that_was_not_sent_is_sent_by_the_next_process(running: Running) -> None:
    left = running.aggregator.handler(running.folder / "device")
    header = running.aggregator.answer(left, running.aggregator.assign(1))[0]
    running.start()
    assert polled(running.fleet, ReplyHeader).update_id == header.update_id


def test_a_state_that_another_version_wrote_ends_the_client_with_what_to_do_and_is_left_alone(running: Running) -> None:
    running.aggregator.answer(running.aggregator.handler(running.folder / "device"), running.aggregator.assign(1))
    state = running.folder / "device" / "runs" / RUN / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    before = {path: path.read_bytes() for path in state.parent.iterdir()}
    running.start().join(60)
    assert running.code == [8]
    assert running.said[-1].splitlines() == [
        f"error: the state of {RUN} has another format than this client reads",
        f"why:   {state} has format 99, this program reads {FORMAT}",
        f"try:   install the thinwire that wrote it, or remove {state.parent}",
    ]
    assert {path: path.read_bytes() for path in state.parent.iterdir()} == before


def test_a_task_that_is_not_here_is_a_failure_of_that_assignment(running: Running) -> None:
    running.start()
    running.send(running.aggregator.assign(1, task="other"))
    assert polled(running.fleet, Failure).kind == "task-missing"


def test_a_task_that_raises_fails_its_assignment_and_says_no_more_than_the_place(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        raise ValueError("the patient's name is Ada")

    running = Running(tmp_path, loss=loss)
    running.start()
    running.send(running.aggregator.assign(1))
    failure = polled(running.fleet, Failure)
    assert (failure.kind, "Ada" in failure.text, "ValueError" in failure.text) == ("task-error", False, True)
    assert "Ada" in (tmp_path / "device" / "last-error.txt").read_text()
    running.stop.set()


def test_a_withdrawn_assignment_is_given_up_and_the_next_one_is_answered(tmp_path: Path) -> None:
    begun, withdrawn = threading.Event(), threading.Event()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        begun.set()
        assert withdrawn.wait(60)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    running = Running(tmp_path, loss=loss, metrics=lambda model, batch: {"loss": (1.0, 1.0)})
    running.start()
    running.send(running.aggregator.assign(1))
    assert begun.wait(60)
    running.fleet.cancel(["a-1"])
    running.send(running.aggregator.assign(2))
    withdrawn.set()
    assert polled(running.fleet, ReplyHeader).assignment_id == "a-2"
    running.stop.set()


@pytest.mark.parametrize(
    ("upload_s", "took_s", "line"),
    [
        (0.5, 5.0, "round 7: sent 1,234 bytes"),
        (0.5, 30.0, "round 7: sent 1,234 bytes, 20.0 s late: training took 9.0 s"),
        (19.8, 30.0, "round 7: sent 1,234 bytes, 20.0 s late: upload took 19.8 s"),
    ],
)
def test_what_was_sent_is_said_and_when_late_what_took_longest(upload_s: float, took_s: float, line: str) -> None:
    assignment = Assignment("a", "r", "t", "train", {}, round=7, deadline_s=10.0)
    parts: Sequence[Part] = (Part("frame/0", 1234, ""),)
    timings = Timings(0.5, 0.1, 0.4, 9.0, 0.1)
    header = ReplyHeader("a", UpdateId("r", "d", 1), 0, 1, parts=tuple(parts), timings=timings)
    assert sent_line(assignment, header, upload_s, took_s) == line


def test_a_masked_update_is_said_to_be_masked_and_no_stage_is_blamed_for_its_delay() -> None:
    assignment = Assignment("a", "r", "t", "train", {}, round=7, deadline_s=10.0, secure=SecureWork(4, 0, 1.0))
    header = without_facts(ReplyHeader("a", UpdateId("r", "d", 1), 0, 1, parts=(Part("masked", 1234, ""),)))
    assert sent_line(assignment, header, 0.5, 5.0) == "round 7: sent 1,234 bytes under masks"
    assert sent_line(assignment, header, 0.5, 30.0) == "round 7: sent 1,234 bytes under masks, 20.0 s late"


def test_what_the_owner_forbids_is_declined_and_the_hello_tells_policies_apart(running: Running) -> None:
    policy, read = Policy(secure="required"), list[object]()
    running.task = task_of(data=read.append)
    running.start(policy)
    running.send(running.aggregator.assign(1))
    failure = polled(running.fleet, Failure)
    assert failure.kind == "declined"
    assert failure.text == "secure: the plan sums in the clear, and masks are required here"
    assert (read, versions(policy)["policy"], "policy" in versions(Policy())) == ([], policy.digest, False)


def test_the_hello_says_which_plans_are_held(running: Running) -> None:
    thread = running.start()
    running.send(running.aggregator.assign(1))
    polled(running.fleet, ReplyHeader)
    running.stop.set()
    thread.join(60)
    running.stop.clear()
    running.start()
    assert running.joined.hello.plans == (running.aggregator.plan.digest,)
    running.stop.set()
