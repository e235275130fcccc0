"""FlowerFleet keeps the laws of a fleet: over real sockets, on the real store and spool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.fleet_laws import FleetLaws
from tests.fleet_words import envelope, join, pulled
from tests.flower.doubles import Place
from thinwire.store import FileSpool, Store


class TestFlowerFleet(FleetLaws):
    def make(self, folder: Path) -> AbstractContextManager[Any]:
        return on_the_store(folder)

    def test_what_a_device_took_up_before_a_restart_is_told_after_it(self, setting: Any) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "ask-1")])
        pulled(link)
        assert [one.ask.ask_id for one in setting.fleet.taken_up()] == ["ask-1"], "and it is not empty here"
        setting.restart()
        setting.fleet.send([envelope("pi-1", "ask-1")])
        assert link.pull(0.1) is None, "it holds it"
        assert [(one.device, one.ask.ask_id) for one in setting.fleet.taken_up()] == [("pi-1", "ask-1")]


@contextlib.contextmanager
def on_the_store(folder: Path, **options: Any) -> Iterator[Place]:
    with Store.open(folder / "store.sqlite3") as store:
        made = Place(folder, roster=store.roster, spool=lambda: FileSpool(folder / "spool"), **options)
        made.new_secret = lambda: store.invitations.invite()[0].secret
        try:
            yield made
        finally:
            made.close()
