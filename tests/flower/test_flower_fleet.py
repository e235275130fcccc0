"""FlowerFleet keeps the laws of a fleet: over real sockets, on the real store and spool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.fleet_laws import FleetLaws
from tests.flower.doubles import Place
from thinwire.store import FileSpool, Store


class TestFlowerFleet(FleetLaws):
    def make(self, folder: Path) -> AbstractContextManager[Any]:
        return on_the_store(folder)


@contextlib.contextmanager
def on_the_store(folder: Path, **options: Any) -> Iterator[Place]:
    with Store.open(folder / "store.sqlite3") as store:
        made = Place(folder, roster=store.roster, spool=lambda: FileSpool(folder / "spool"), **options)
        made.new_secret = lambda: store.invitations.invite()[0].secret
        try:
            yield made
        finally:
            made.close()
