"""A store in a folder of its own, and one on PostgreSQL: each test of a store runs on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.backups import Place
from tests.support.cheap_passwords import cheap_passwords
from tests.support.postgres import OwnTables, empty_database
from tests.support.store_agreement import empty_database as made_database
from thinwire.core.clock import VirtualClock
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.store.backup import back_up

__all__ = ["cheap_passwords"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[OwnTables]:
    """A database of PostgreSQL that this process may empty."""
    with empty_database() as url, OwnTables.of(url) as tables:
        yield tables


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database; for a test that has a `store` too, the empty tables are there already."""
    has_store = "store" in request.fixturenames
    if request.param == "sqlite":
        path = tmp_path / "store.sqlite3"
        if has_store:
            path.touch(0o600)
            path.write_bytes(made_database())
        return str(path)
    tables: OwnTables = request.getfixturevalue("postgres")
    if has_store:
        tables.empty()
    else:
        tables.drop()
    return tables.url


@pytest.fixture
def store(address: str, clock: VirtualClock) -> Iterator[Store]:
    with Store.open(address, clock=clock) as opened:
        yield opened


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "here")


@pytest.fixture
def file(place: Place, tmp_path: Path) -> Path:
    back_up(place.home, tmp_path / "backup.tar", "1.2.3")
    return tmp_path / "backup.tar"


@pytest.fixture
def there(tmp_path: Path) -> AggregatorHome:
    return AggregatorHome(tmp_path / "there" / "aggregator")
