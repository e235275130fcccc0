"""The fleet in one process keeps the laws of every fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.fleet_laws import FleetLaws
from thinwire.core.fleet import Link
from thinwire.simulation.local import LocalFleet, LocalLink
from thinwire.store import FileSpool, Store


class LocalSetting:
    """A LocalFleet on the real spool; a restart is a new fleet over the same folder."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "store.sqlite3")
        self.roster, self.spool = self.store.roster, FileSpool(folder / "spool")
        self.fleet = LocalFleet(self.spool)

    def link(self, name: str) -> Link:
        return LocalLink(self.fleet, name)


class TestLocalFleet(FleetLaws):
    @contextlib.contextmanager
    def make(self, folder: Path) -> Iterator[LocalSetting]:
        setting = LocalSetting(folder)
        yield setting
        setting.store.close()
