"""A device that stands still keeps its connection and its waiting pull, and is not called heard for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.callers import tls_place
from tests.support.cli_story import KEY
from tests.support.fleet_words import PATIENCE_S, hello, join, polled, until
from tests.support.transport_doubles import Place, place
from thinwire.cli.devices.render import AggregatorState
from thinwire.core.clock import VirtualClock, heard_by
from thinwire.core.events import DeviceOnline
from thinwire.core.fleet import ClientConnected, ClientDisconnected
from thinwire.core.link_state import POLL_S
from thinwire.flower.fleet import GRACE_S
from thinwire.flower.link_state import SuperLink
from thinwire.store import Store
from thinwire.transport.server.presence import Presence


@pytest.fixture(params=[place, tls_place])
def here(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    with request.param(tmp_path, grace_s=0.2, poll_s=0.5, directory=tmp_path) as made:
        yield made


def test_a_pull_that_is_answered_is_no_word_of_the_device(here: Place, tmp_path: Path) -> None:
    """Its process may have been stopped since it selected: what counts is when it selected."""
    link = join(here, "pi-1")
    polled(here.fleet, ClientConnected)
    presence = here.fleet._presence
    waiting = threading.Thread(target=link.pull, args=(0.5,))
    waiting.start()
    until(lambda: (one := presence.of("pi-1")) and one.calls)
    assigned = presence.last_seen()["pi-1"]
    waiting.join(PATIENCE_S)
    until(lambda: not (one := presence.of("pi-1")) or not one.calls)
    assert presence.last_seen().get("pi-1", assigned) == assigned
    until(lambda: "pi-1" in heard_by(tmp_path / "lock"))
    left = polled(here.fleet, ClientDisconnected)
    assert left.silent_s >= 0.5  # since it selected, and not since it was answered


class Wire:
    open = True
    on_close: Any = None


def test_online_is_who_was_heard_within_two_polls() -> None:
    clock, left = VirtualClock(), list[tuple[str, str, float]]()
    state = SuperLink().state
    state.register("pi-1", b"key")
    presence = Presence(state, clock, GRACE_S, POLL_S, lambda *gone: left.append(gone))
    presence.begin(hello("pi-1"), Wire())  # type: ignore[arg-type]  # a connection that stays open
    with presence.call("pi-1", waits=True):
        clock.advance(1.1 * POLL_S)
        presence.sweep()
        assert not left  # its pull waits here
    clock.advance(POLL_S - 1.1 * POLL_S + POLL_S - 1)
    presence.sweep()
    assert not left
    clock.advance(2)
    presence.sweep()
    assert [(name, round(silent)) for name, _, silent in left] == [("pi-1", 2 * POLL_S + 1)]


def test_a_list_says_for_how_long_a_device_was_silent(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.sqlite3") as store:
        store.roster.enrol("pi-1", KEY, b"key", "loopback")
        store.record_device(DeviceOnline(1000.0, "pi-1"))
        (info,) = store.devices()
    assert AggregatorState(last_contacts={"pi-1": 1200.0}).last_seen_at(info) == 1200.0
    assert AggregatorState(last_contacts={"pi-1": 900.0}).last_seen_at(info) == 1000.0  # of its life before
    assert AggregatorState(alive=False, down_since=2000.0, last_contacts={"pi-1": 1200.0}).last_seen_at(info) == 1200.0
