"""The fleet in one process keeps the laws of every fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.fleet_laws import FleetLaws
from tests.support.fleet_words import answer, hello, written
from thinwire.core.fleet import Link
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.storage import InMemorySpool
from thinwire.store import FileSpool, Store


class LocalSetting:
    """A LocalFleet on the real spool; a restart is a new fleet over the same folder."""

    def __init__(self, folder: Path, spool: type[FileSpool] = FileSpool) -> None:
        self.store = Store.open(folder / "store.sqlite3")
        self.roster, self.spool = self.store.roster, spool(folder / "spool")
        self.fleet = LocalFleet(self.spool)
        self.links: list[LocalLink] = []

    def link(self, name: str) -> Link:
        self.links.append(LocalLink(self.fleet, name))
        return self.links[-1]

    def restart(self) -> None:
        self.fleet = LocalFleet(self.spool)
        for link in self.links:
            link.fleet = self.fleet
            link.hello(hello(link.name))


class TestLocalFleet(FleetLaws):
    @contextlib.contextmanager
    def make(self, folder: Path) -> Iterator[LocalSetting]:
        setting = LocalSetting(folder)
        yield setting
        setting.store.close()


class TestLocalFleetInMemory(FleetLaws):
    """As simulations have it."""

    @contextlib.contextmanager
    def make(self, folder: Path) -> Iterator[LocalSetting]:
        setting = LocalSetting(folder, InMemorySpool)
        yield setting
        setting.store.close()


def test_what_does_not_fit_into_memory_lies_in_a_file(tmp_path: Path) -> None:
    spool = InMemorySpool(tmp_path / "spool", max_bytes=4)
    fleet = LocalFleet(spool)
    link = LocalLink(fleet, "a")
    for sequence, body in enumerate([b"1234", b"5678"], start=1):
        header = answer("a", f"assignment-{sequence}", sequence, body)
        link.push(header, written(tmp_path, body))
        assert b"".join(fleet.open(header.update_id)) == body
    assert [path.read_bytes() for path in (tmp_path / "spool").glob("*/*.reply")] == [b"5678"]
    fleet.ack([header.update_id for header in spool.headers()])
    assert spool.headers() == []
    assert not list((tmp_path / "spool").glob("*/*.reply"))
