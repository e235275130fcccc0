"""A store in a folder of its own, and one on PostgreSQL: each test of a store runs on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.backups import Place
from tests.support.cheap_passwords import cheap_passwords
from tests.support.postgres import empty_database, execute
from thinwire.core.clock import VirtualClock
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.store.backup import back_up

__all__ = ["cheap_passwords"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a database of PostgreSQL that this process may empty."""
    with empty_database() as url:
        yield url


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite3")
    url: str = request.getfixturevalue("postgres")
    execute(url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return url


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
