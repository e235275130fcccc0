"""Connections that say nothing keep nobody out: neither newcomers, nor the addresses of devices that are known."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import PATIENCE_S, Caller, TlsPlace, address_of
from tests.support.fleet_words import until
from tests.support.transport_doubles import Place
from tests.system.attacks.places import attacked, device_of
from thinwire.transport.protocol.http import CA
from thinwire.transport.server.connections import MAX_UNSIGNED

ADDRESSES, EACH = 18, 32  # 576 connections


@pytest.fixture(params=["plain", "tls"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with attacked(tmp_path, tls=request.param == "tls", grace_s=60.0, directory=tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Both ends of the connections are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_UNSIGNED if hard == resource.RLIM_INFINITY else min(hard, 4 * MAX_UNSIGNED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def silent(here: Place, count: int = ADDRESSES * EACH) -> Iterator[list[socket.socket]]:
    """So many connections, 32 of each address, which the device API has seen and on which nothing is said."""
    with contextlib.ExitStack() as stack:
        before, made = here.fleet.stats(), list[socket.socket]()
        for nth in range(count):
            source = (f"127.77.{nth // EACH // 250}.{1 + nth // EACH % 250}", 0)
            made.append(stack.enter_context(socket.create_connection(address_of(here), PATIENCE_S, source)))

        def came() -> int:
            stats = here.fleet.stats()
            return sum(stats[name] - before[name] for name in ("strangers", "refused_connections"))

        until(lambda: came() >= count)
        yield made


def test_a_newcomer_comes_in_beside_576_silent_connections_of_18_addresses(here: Place) -> None:
    with silent(here) as lines:
        device_of(here, "pi-1")
        assert here.fleet.stats()["strangers"] <= MAX_UNSIGNED
        assert lines[0].recv(1) == b"", "the oldest made room"


def test_a_known_address_keeps_its_connection_while_strangers_fill_the_others(here: Place) -> None:
    """Also over a restart: where devices have signed is kept on disk."""
    device_of(here, "pi-1")
    here.restart()
    caller = Caller(here, "pi-2")
    open_before = caller.connection()
    with silent(here):
        assert here.fleet.stats()["refused_connections"] > 0
        path = CA if isinstance(here, TlsPlace) else "/nothing"
        assert caller.call("GET", path, headers={}, on=open_before).status in (200, 404)
    open_before.close()
    assert (here.folder / "addresses.json").stat().st_mode & 0o777 == 0o600
