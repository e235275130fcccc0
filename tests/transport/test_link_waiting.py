"""A device behind TLS waits for an assignment: what that costs, and what ends a wait that no answer will end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet_words import PATIENCE_S, envelope, hello, until  # fmt: skip
from tests.support.proxy import proxy
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import Unreachable
from thinwire.core.fleet import Delivery
from thinwire.core.link_state import POLL_S
from thinwire.transport.device.connect import has_new_address

DAY_S = 86_400.0


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, tls=True) as made:
        yield made


def test_pulls_draw_their_wait_again_from_within_a_tenth(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    waited: list[float] = []
    monkeypatch.setattr(link, "_pull", lambda wait_s, reply: waited.append(wait_s))
    for _ in range(200):
        link.pull(240.0)
    assert 216 <= min(waited) < 222
    assert 258 < max(waited) <= 264
    assert len(set(waited)) > 190


def test_one_idle_day_costs_less_than_a_megabyte(here: Place) -> None:
    """Measured on the wire for one poll; around it TCP/IP of six packets, and two keepalive packets a minute."""
    header, polls, probes = 66, DAY_S / POLL_S, DAY_S / 60
    with proxy(here.fleet.address) as line:
        here.link("pi-1").close()
        here.api = line.address
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        link.pull(0.0)
        before = line.up.given + line.down.given
        for _ in range(10):
            link.pull(0.0)
        each = (line.up.given + line.down.given - before) / 10
    assert polls * (each + 6 * header) + probes * 2 * header < 1_000_000, each


def test_a_device_that_moved_polls_again_at_once(here: Place) -> None:
    away = threading.Event()

    def has_new_address(line: object) -> bool:
        was = away.is_set()
        away.clear()
        return was

    link, got = here.link("pi-1", check_every_s=0.02, has_new_address=has_new_address), list[Delivery | None]()
    link.hello(hello("pi-1"))
    thread = threading.Thread(target=lambda: got.append(link.pull(60.0)))
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] == 1)
    away.set()
    until(lambda: here.fleet.stats()["requests"]["pull"] == 2)
    here.fleet.send([envelope("pi-1", "assignment-1")])
    thread.join(PATIENCE_S)
    assert [delivery.assignment.assignment_id for delivery in got if delivery] == ["assignment-1"]


def test_this_machine_has_moved_when_it_would_come_from_another_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for source, expected in (("127.0.0.1", False), ("127.0.0.2", True)):
            with socket.create_connection(server.getsockname(), source_address=(source, 0)) as made:
                assert has_new_address(made) is expected
                server.accept()[0].close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP user time-out")
def test_a_dead_line_is_noticed_by_the_system(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    line = link._pulling._line
    assert line is not None
    assert line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_round_trip_is_measured_and_told(here: Place) -> None:
    began = time.monotonic()
    with proxy(here.fleet.address) as line:
        here.link("pi-1").close()
        here.api = line.address
        here.link("pi-1").hello(hello("pi-1"))
    assert 0 < here.roster.hellos[-1].link["rtt_s"] <= time.monotonic() - began


def test_after_a_lost_aggregator_a_device_is_told_within_what_time_to_come_back(tmp_path: Path) -> None:
    """Also in its next process: the power may have gone at the devices as well."""
    with place(tmp_path, tls=True) as here:
        link = here.link("pi-1")
        for at in range(300):
            here.roster.enrol(f"other-{at}", f"{at:064x}", b"", "invitation")
        link.hello(hello("pi-1"))
        paused: list[bool] = []
        link._pause = lambda: paused.append(True)  # type: ignore[method-assign]  # a spy
        here.fleet.close()
        with pytest.raises(Unreachable) as lost:
            link.pull(1.0)
        assert lost.value.within_s == pytest.approx(3.01)
        second = here.link("pi-1")
        second._pause = lambda: paused.append(True)  # type: ignore[method-assign]  # a spy
        with pytest.raises(Unreachable):
            second.hello(hello("pi-1"))
        assert paused == [True]
