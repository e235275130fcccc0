"""A task's code on a real device requests the end of its process: its assignment fails, and the device works on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.fleet_words import polled
from tests.support.trained_elsewhere import Elsewhere
from tests.system.attacks.places import attacked
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve
from thinwire.client.reloader import Reloader
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.fleet import ClientConnected, Envelope
from thinwire.core.types import Failure, ReplyHeader

WISHES = {"sys.exit()": "SystemExit", "os._exit(0)": "os._exit", "raise KeyboardInterrupt": "KeyboardInterrupt"}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_device_whose_task_requests_the_end_of_its_process_says_where_and_answers_the_next_assignment(
    tmp_path: Path, tls: bool
) -> None:
    device, stop, said = Elsewhere(tmp_path, threads=1), threading.Event(), list[str]()
    device.worker.describe()
    with attacked(tmp_path, tls=tls) as here:
        link = here.link("pi-01")
        own = Device(ClientInfo("pi-01"), device.folder, AdmissionController(folder=device.folder))
        serving = threading.Thread(
            target=serve, args=(link, device.worker.executors(), own, stop),
            kwargs={"reloader": Reloader(own.admission, device.worker), "say": said.append},
        )  # fmt: skip
        serving.start()
        try:
            polled(here.fleet, ClientConnected)
            for number, (wish, by) in enumerate(WISHES.items(), start=1):
                device.wish(wish)
                assignment = device.aggregator.assign(number)
                here.fleet.send([Envelope("pi-01", assignment.assignment, assignment.bundle)])
                failure = polled(here.fleet, Failure)
                assert (failure.kind, failure.text) == ("task-error", f"{by} at task.py:32")
            device.wish()
            assignment = device.aggregator.assign(len(WISHES) + 1)
            here.fleet.send([Envelope("pi-01", assignment.assignment, assignment.bundle)])
            assert polled(here.fleet, ReplyHeader).parts
        finally:
            stop.set()
            serving.join()
    assert any("SystemExit at task.py:32" in line for line in said)
