"""`thinwire client reload`: the tasks and the policy as they are now, told to the aggregator, and no assignment is
lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_words import polled
from tests.support.small_task import plan_of
from tests.support.trained_elsewhere import TASK, Elsewhere
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve
from thinwire.client.policy import FILE, load_policy
from thinwire.client.reloader import Reloader
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.fleet import ClientConnected, Envelope
from thinwire.core.types import Failure, Reply, ReplyHeader
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.store import FileSpool

DEVICE = "pi-01"


class Reloadable:
    """A service in a thread, whose tasks are worked on elsewhere, and the fleet that it belongs to."""

    def __init__(self, folder: Path, plan: Any = None) -> None:
        self.elsewhere = Elsewhere(folder, plan)
        self.rules = self.elsewhere.folder / FILE
        self.fleet = LocalFleet(FileSpool(folder / "spool"))
        self.stop, self.wished, self.said = threading.Event(), threading.Event(), list[str]()
        (folder / "downloads").mkdir()
        self.elsewhere.worker.describe()
        self._thread = threading.Thread(target=self._run, args=(folder / "downloads",))
        self._thread.start()
        self.first = polled(self.fleet, ClientConnected)

    def _run(self, downloads: Path) -> None:
        worker, folder = self.elsewhere.worker, self.elsewhere.folder
        device = Device(ClientInfo(DEVICE), folder, AdmissionController(folder=folder))
        reloader = Reloader(device.admission, worker, self.wished, lambda: load_policy(self.rules))
        link = LocalLink(self.fleet, DEVICE, downloads=downloads)
        serve(link, worker.executors(), device, self.stop, reloader=reloader, say=self.said.append)

    def answer(self, number: int, **changed: Any) -> Reply:
        assignment = self.elsewhere.aggregator.assign(number, **changed)
        self.fleet.send([Envelope(DEVICE, assignment.assignment, assignment.bundle)])
        return polled(self.fleet, (ReplyHeader, Failure))  # type: ignore[arg-type]  # either of them

    def reloaded(self) -> ClientConnected:
        """What the device says of itself after a reload, while its pull waits."""
        self.wished.set()
        return polled(self.fleet, ClientConnected)

    def close(self) -> None:
        self.stop.set()
        self._thread.join(30)


@pytest.fixture
def reloadable(tmp_path: Path) -> Iterator[Reloadable]:
    made = Reloadable(tmp_path)
    yield made
    made.close()


def test_a_reload_imports_the_code_as_it_is_now_in_a_fresh_process(reloadable: Reloadable) -> None:
    assert isinstance(reloadable.answer(1), ReplyHeader)
    before = reloadable.elsewhere.worker.pid
    reloadable.elsewhere.file.write_text(TASK + "\n__version__ = '2.0'\n")
    (told,) = reloadable.reloaded().hello.tasks
    (first,) = reloadable.first.hello.tasks
    assert (first.version, told.version) == ("", "2.0")
    assert first.source_digest != told.source_digest
    assert reloadable.elsewhere.worker.pid not in (None, before)
    assert isinstance(reloadable.answer(2), ReplyHeader)
    assert any(line.startswith("the task small is 2.0 ") for line in reloadable.said)


OWN = """

def train(model, data, context):
    context.state["times"] = context.state.get("times", 0) + 1
    with torch.no_grad():
        model[4].bias += 1.0
    context.report("times", context.state["times"])
    context.report("head", model[4].bias.mean())
    return len(data)
"""


def test_a_reload_keeps_the_personal_layers_and_the_state_of_train(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK + OWN)
    made = Reloadable(tmp_path, plan_of('personal_layers = ["4.*"]'))
    try:
        first = made.answer(1)
        made.elsewhere.file.write_text(TASK + OWN + "\n__version__ = '2.0'\n")
        made.reloaded()
        second = made.answer(2)
    finally:
        made.close()
    assert isinstance(first, ReplyHeader) and isinstance(second, ReplyHeader)
    assert (first.metrics["train/times"], second.metrics["train/times"]) == ((1.0, 1.0), (2.0, 1.0))
    assert second.metrics["train/head"][0] == pytest.approx(first.metrics["train/head"][0] + 1)
    assert (first.metrics["eval/personal"][0], second.metrics["eval/personal"][0]) == (0.0, 24.0)


def test_a_reload_of_code_that_does_not_import_is_told_and_the_next_one_mends_it(reloadable: Reloadable) -> None:
    reloadable.elsewhere.file.write_text(TASK.replace("def model", "raise ValueError('Ada')\n\n\ndef model"))
    (told,) = reloadable.reloaded().hello.tasks
    assert ("cannot import" in told.error, "Ada" in told.error) == (True, False)
    failure = reloadable.answer(1)
    assert isinstance(failure, Failure)
    assert failure.kind == "task-error"
    reloadable.elsewhere.file.write_text(TASK)
    assert reloadable.reloaded().hello.tasks == reloadable.first.hello.tasks
    assert isinstance(reloadable.answer(2), ReplyHeader)


def test_a_task_that_failed_to_load_is_imported_again_by_the_client(reloadable: Reloadable) -> None:
    reloadable.elsewhere.file.write_text(TASK.replace("def model", "raise ValueError('full')\n\n\ndef model"))
    (told,) = reloadable.reloaded().hello.tasks
    assert told.error
    reloadable.elsewhere.file.write_text(TASK)
    reloadable.elsewhere.worker.idle_s = 0.0
    assert polled(reloadable.fleet, ClientConnected).hello.tasks == reloadable.first.hello.tasks


def test_a_reload_reads_the_policy_again_and_tells_that_it_is_another_one(reloadable: Reloadable) -> None:
    reloadable.rules.write_text('[policy]\nkinds = ["evaluate"]\n')
    told = reloadable.reloaded().hello
    assert "policy" not in reloadable.first.hello.versions
    assert told.versions["policy"] == load_policy(reloadable.rules).digest
    failure = reloadable.answer(1)
    assert isinstance(failure, Failure)
    assert failure.kind == "declined"
    reloadable.rules.unlink()
    assert "policy" not in reloadable.reloaded().hello.versions
    assert isinstance(reloadable.answer(2), ReplyHeader)


def test_a_policy_that_is_not_readable_leaves_the_one_before_in_force(reloadable: Reloadable) -> None:
    reloadable.rules.write_text('[policy]\nkinds = ["evaluate"]\n')
    reloadable.reloaded()
    reloadable.rules.write_text('[policy]\nkindz = ["train"]\n')
    reloadable.elsewhere.file.write_text(TASK + "\n__version__ = '2.0'\n")
    told = reloadable.reloaded().hello  # of the code: both are looked at by one reload
    assert told.tasks[0].version == "2.0"
    assert any(line.startswith("the policy stays as it was") for line in reloadable.said)
    failure = reloadable.answer(1)
    assert isinstance(failure, Failure)
    assert failure.kind == "declined"
