"""A store to look at, the application on it, and a browser's session."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_answers import DEVICES, Told
from tests.support.browsing import browser, lasting_browser, look, served
from tests.support.cheap_passwords import cheap_passwords
from tests.support.filled_store import add_devices, finish, new_run, twelve_rounds
from thinwire.store import Store
from thinwire.store.database import database_url
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

with warnings.catch_warnings():  # it says that it would rather have httpx2
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

__all__ = ["browser", "cheap_passwords", "lasting_browser", "look", "served"]
HOST = "http://127.0.0.1:8080"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run of twelve rounds that is over, in a database that is only ever copied."""
    with Store.open(tmp_path_factory.mktemp("told") / "store.sqlite3") as store:
        run = twelve_rounds(store)
        finish(run)
    return run


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store, or for who requests `told` too the one with its run."""
    path = tmp_path / "store.sqlite3"
    if "told" in request.fixturenames:
        shutil.copy(database_url(request.getfixturevalue("finished").store.url).database or "", path)
    with Store.open(path) as opened:
        yield opened


@pytest.fixture
def told(store: Store, finished: Told) -> Told:
    """A run of twelve rounds that is over."""
    return replace(finished, store=store)


@pytest.fixture
def run(store: Store) -> Told:
    """A running run with a quiet round."""
    add_devices(store, DEVICES, time.time())
    run = new_run(store, at=time.time() - 60)
    run.quiet_round()
    return run


@pytest.fixture
def visit(store: Store) -> Iterator[Callable[..., TestClient]]:
    """Makes clients of the dashboard, which follow no redirect; they have not logged in."""
    clients: list[TestClient] = []

    def make(base: str = HOST, **settings: Any) -> TestClient:
        app = create_app(replace(Settings(store.url, port=8080), **settings), store)
        clients.append(TestClient(app, base_url=base, follow_redirects=False))
        return clients[-1].__enter__()

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def page(visit: Callable[..., TestClient], store: Store) -> TestClient:
    """One who has logged in."""
    client = visit()
    assert client.post("/login", data={"code": store.logins.new_code()}).status_code == 303
    return client
