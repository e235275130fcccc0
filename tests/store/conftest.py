"""A store in a folder of its own; THINWIRE_TEST_POSTGRES (a URL) runs the same tests on PostgreSQL too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tests.support.backups import Place
from thinwire.core.clock import VirtualClock
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.store.backup import back_up

POSTGRES = os.environ.get("THINWIRE_TEST_POSTGRES", "")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(params=["sqlite", *(["postgres"] if POSTGRES else [])])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite3")
    empty_postgres()
    return POSTGRES


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


def empty_postgres() -> None:
    engine = create_engine(POSTGRES.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
