"""An aggregator in this process: the real device API and lane, a real store and a spool on disk, plain or over TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.callers import Caller, TlsPlace, joined, tls_place
from tests.support.transport_doubles import Place
from thinwire.store import FileSpool, Store


@contextlib.contextmanager
def attacked(folder: Path, *, tls: bool, **options: Any) -> Iterator[Place]:
    """A place on a real store, as an aggregator's process has it."""
    if tls:
        with tls_place(folder, **options) as private:
            yield private
        return
    with Store.open(folder / "store.sqlite3") as store:
        made = Place(folder, store.roster, lambda: FileSpool(folder / "spool"), **options)
        try:
            yield made
        finally:
            made.close()


def device_of(here: Place, name: str = "pi-1") -> Caller:
    """A device that is approved and has said hello, and whose requests are made by hand."""
    caller = joined(here, name) if isinstance(here, TlsPlace) else Caller(here, name)
    assert caller.hello().status == 200
    return caller
