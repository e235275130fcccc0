"""FlowerFleet keeps the laws of a fleet: over real sockets, on the real store and spool."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_laws import FleetLaws
from tests.support.fleet_words import envelope, join, polled, pulled, until
from tests.support.transport_doubles import Place
from thinwire.core.errors import Unreachable
from thinwire.core.fleet import ClientConnected, ClientDisconnected, Envelope
from thinwire.core.types import Assignment
from thinwire.flower import FlowerFleet
from thinwire.store import FileSpool, Store

STOP = Envelope("pi-1", Assignment("stop-1", "digits-1", "digits", "stop", ""))


class TestFlowerFleet(FleetLaws):
    def make(self, folder: Path) -> AbstractContextManager[Any]:
        return on_the_store(folder)

    def test_what_a_device_took_up_before_a_restart_is_told_after_it(self, setting: Any) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        assert [one.assignment.assignment_id for one in setting.fleet.delivered()] == ["assignment-1"], (
            "and it is not empty here"
        )
        setting.restart()
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        assert link.pull(0.1) is None, "it holds it"
        assert [(one.device, one.assignment.assignment_id) for one in setting.fleet.delivered()] == [
            ("pi-1", "assignment-1")
        ]

    def test_a_stop_that_is_held_and_sent_again_while_its_device_waits_is_said_to_be_taken(self, setting: Any) -> None:
        """The aggregator was killed before it could write down who had heard."""
        link = join(setting, "pi-1")
        setting.fleet.send([STOP])
        pulled(link)
        setting.restart()
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(link.pull, 5.0)
            polled(setting.fleet, ClientConnected)
            until(lambda: setting.fleet._presence.of("pi-1").pull_epoch)
            setting.fleet.send([STOP])
            assert waiting.result() is None, "it holds it"
        assert [(one.device, one.assignment.kind) for one in setting.fleet.delivered()] == [("pi-1", "stop")]

    def test_a_stop_is_held_until_the_pull_after_it_is_answered(self, setting: Any) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([STOP])
        pulled(link)
        setting.fleet.close()
        with pytest.raises(Unreachable):
            link.pull(0.1)
        setting.restart()
        link.pull(0.1)
        assert setting.fleet._state.held("pi-1") == {"stop-1"}, "it could not be said before"
        link.pull(0.1)
        assert setting.fleet._state.held("pi-1") == set()

    def test_a_stop_is_not_given_to_a_process_that_was_not_there_when_it_was_sent(self, setting: Any) -> None:
        """Its hello names what its device keeps, and the welcome which of it is over."""
        link = join(setting, "pi-1")
        setting.fleet.send([STOP])
        assert pulled(link).assignment.kind == "stop"
        link.close()  # and it never says that it has it
        assert join(setting, "pi-1").pull(0.1) is None


def test_a_device_goes_offline_although_the_certificate_could_not_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def renew(_fleet: FlowerFleet) -> None:
        failed.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(FlowerFleet, "_renew", renew)
    with on_the_store(tmp_path, grace_s=0.1) as setting:
        assert failed.wait(30)
        link = join(setting, "pi-1")
        polled(setting.fleet, ClientConnected)
        link.close()
        assert polled(setting.fleet, ClientDisconnected).device == "pi-1"
    assert "a task of the device API failed" in caplog.text


@contextlib.contextmanager
def on_the_store(folder: Path, **options: Any) -> Iterator[Place]:
    with Store.open(folder / "store.sqlite3") as store:
        made = Place(folder, roster=store.roster, spool=lambda: FileSpool(folder / "spool"), **options)
        made.new_secret = lambda: store.invitations.invite()[0].secret
        try:
            yield made
        finally:
            made.close()
