"""A row of the devices' table whose key was damaged keeps that device out, and nobody else."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tests.support.callers import TlsPlace
from tests.support.fleet_words import envelope, hello, join, polled, pulled
from tests.support.transport_doubles import Place
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import ClientConnected
from thinwire.store import FileSpool, Store


class PlainPlace(Place):
    """A plain device API on a real store."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "store.sqlite3")
        super().__init__(folder, self.store.roster, lambda: FileSpool(folder / "spool"))


@pytest.mark.parametrize("kind", [PlainPlace, TlsPlace])
@pytest.mark.parametrize("damage", ["x'00'", "x''", "substr(public_key, 1, 40)", "CAST(public_key || x'00' AS BLOB)"])
def test_one_damaged_key_stops_no_aggregator(
    tmp_path: Path, kind: type[PlainPlace | TlsPlace], damage: str, caplog: pytest.LogCaptureFixture
):
    with contextlib.closing(kind(tmp_path)) as here, here.store:
        for name in ("pi-1", "pi-2"):
            join(here, name)
        with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite3")) as row, row:
            row.execute(f"UPDATE devices SET public_key = {damage}, change = change + 9 WHERE name = 'pi-1'")
        here.store.roster.refresh()  # a new process reads the devices again; here the store stays
        here.restart()
        assert "the key of pi-1 is damaged" in caplog.text
        with pytest.raises(ThinwireError, match="the key of pi-1 is damaged"):
            here.link("pi-1").hello(hello("pi-1"))
        link = join(here, "pi-2")
        polled(here.fleet, ClientConnected, lambda joined: joined.device == "pi-2")
        here.fleet.send([envelope("pi-2", "assignment-1")])
        assert pulled(link).assignment.assignment_id == "assignment-1"
