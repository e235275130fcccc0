"""Following a run: what is told for good, and the live sentence below, as its queue and its aggregator come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.support.cli_story import T, told
from thinwire.cli import console
from thinwire.cli.aggregator.serve import left_address
from thinwire.cli.console import moment
from thinwire.cli.local_state import absence_text, alive, start_hint
from thinwire.cli.runs import progress
from thinwire.core.clock import DOWN_SINCE
from thinwire.core.errors import Unreachable
from thinwire.core.events import RunStatusChanged
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome, hold


class Followed:
    """What is said of a run while one thing after the other happens, with a look in between, ten seconds apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], object]) -> None:
        self.alive, self.told, self.shown = True, list[str](), list[str]()
        self._happens, self._elapsed_s = iter(happens), 0.0
        monkeypatch.setattr(progress, "screen", self._screen)
        monkeypatch.setattr(progress, "alive", lambda home: {"pid": 1} if self.alive else None)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self._elapsed_s, sleep=self._next))

    @contextmanager
    def _screen(self):
        yield self.told.append, self.shown.append

    def _next(self, seconds: float) -> None:
        self._elapsed_s += 10.0
        next(self._happens)()

    def comes(self) -> None:
        self.alive = True

    def goes(self) -> None:
        self.alive = False


@pytest.fixture
def ends(store):
    def ends(run_id: str) -> None:
        store.record(run_id, [RunStatusChanged(T + 20, "done", "2 rounds")])

    return ends


def test_a_run_that_waits_for_its_turn_says_behind_which(monkeypatch, home, store, ends):
    first, second = told(home, "running"), told(home, "queued")
    store.record(first, [RunStatusChanged(T + 10, "waiting", "waiting: 1 of 2 devices (missing pi-02)")])
    said = Followed(monkeypatch, lambda: ends(first), lambda: ends(second))
    assert progress.follow(store, second, home) == 0
    assert said.shown == [
        "toy-2: waiting in the queue behind toy-1, which is waiting: 1 of 2 devices (missing pi-02)",
        "toy-2: 2 rounds",
    ]


def test_while_no_aggregator_runs_that_is_said_and_since_when(monkeypatch, home, store, ends):
    run_id, lock = told(home, "running"), AggregatorHome.under(home).lock
    lock.touch()
    os.utime(lock, (T, T))
    said = Followed(monkeypatch, lambda: said.goes(), lambda: None, lambda: said.comes(), lambda: ends(run_id))
    assert progress.follow(store, run_id, home) == 0
    gone = f"no aggregator has been running since {moment(T)}"
    assert said.shown == ["toy-1: 2 rounds", f"toy-1: {gone}", f"toy-1: {gone}", "toy-1: 2 rounds"]
    assert said.told[-3:] == [
        f"{gone}; the run goes on when one does: thinwire aggregator start --home {home}",
        "an aggregator is running again",
        "toy-1 done: 2 rounds",
    ]


def test_who_begins_to_watch_while_none_runs_is_told_at_once(monkeypatch, home, store, ends):
    run_id = told(home, "running")
    said = Followed(monkeypatch, lambda: ends(run_id))
    said.goes()
    assert progress.follow(store, run_id, home) == 0
    assert said.shown == ["toy-1: no aggregator is running"]


def test_while_a_new_one_starts_the_absence_is_the_same_and_nobody_is_told_to_start_one(
    monkeypatch, thinwire, home, store, device, ends
):
    run_id, lock = told(home, "running"), AggregatorHome.under(home).lock
    gone, comes = f"no aggregator has been running since {moment(T)}", f"one is starting (process {os.getpid()})"
    with hold(lock, {DOWN_SINCE: T}):  # it beats already
        said = Followed(monkeypatch, lambda: ends(run_id))
        said.goes()
        assert "aggregator start" not in "".join(
            thinwire(*words, "--home", home).err for words in (("runs", "list"), ("devices", "list"))
        )
        assert comes in thinwire("runs", "list", "--home", home).err
        assert thinwire("devices", "list", "--home", home).err == f"{gone}: nobody can tell who is online; {comes}\n"
        refused = thinwire("aggregator", "status", "--home", home)
        assert (refused.code, "the same command in a moment" in refused.err) == (4, True)
        assert progress.follow(store, run_id, home) == 0
    assert said.shown == [f"toy-1: {gone}"]
    assert f"{gone}; the run goes on when one does: {comes}" in said.told


def test_an_aggregator_is_started_again_with_the_addresses_that_its_devices_know(thinwire, home):
    told(home, "running")
    place, options = AggregatorHome.under(home).root, StartOptions({"listen": "0.0.0.0:9090", "san": ["agg one"]})
    assert left_address(place, StartOptions(), home) == ""
    (place / "tls").mkdir()
    (place / "tls" / "ab.ca.pem").touch()  # restored from a backup, which does not have the options
    said = left_address(place, StartOptions(), home)
    assert said.endswith(f"own address: thinwire aggregator start --listen 0.0.0.0:9090 --home {home}")
    options.save(place)
    again = f"thinwire aggregator start --listen 0.0.0.0:9090 --san 'agg one' --home {home}"
    assert again in thinwire("runs", "list", "--home", home).err
    assert again in thinwire("aggregator", "status", "--home", home).err
    assert left_address(place, StartOptions(), home).endswith(f"which its devices know: {again}")
    assert left_address(place, StartOptions({"listen": "0.0.0.0:9091"}), home) == ""


def test_an_absence_began_when_the_last_one_that_served_ended_however_often_one_starts(
    monkeypatch, thinwire, home, store
):
    lock, said = AggregatorHome.under(home).lock, list[object]()
    lock.touch()
    os.utime(lock, (T, T))

    def no_fleet(*args: object, **options: object) -> None:
        said.extend([absence_text(home), alive(home), start_hint(home)])
        raise Unreachable("no device API today")

    monkeypatch.setattr("thinwire.flower.FlowerFleet", no_fleet)
    for _ in range(2):
        failed = thinwire("aggregator", "start", "--listen", "127.0.0.1:0", "--no-dashboard", "--home", home)
        assert "no device API today" in failed.err
        said.append(absence_text(home))
    since = f"no aggregator has been running since {moment(T)}"
    assert said == [since, None, f"one is starting (process {os.getpid()})", since] * 2


def test_a_command_in_what_is_said_names_the_state_directory(capsys, monkeypatch):
    monkeypatch.setattr(console, "_words", ["run", "plan.toml", "--home", "/srv/fl"])
    with progress.screen() as (tell, show):
        show("toy-1: waiting: 0 of 1 device; start more clients, or end it: thinwire runs stop toy-1")
        tell("toy-1 failed: thinwire runs show toy-1")
    assert [line.partition("thinwire")[2] for line in capsys.readouterr().err.splitlines()] == [
        " runs stop --home /srv/fl toy-1", " runs show --home /srv/fl toy-1",
    ]  # fmt: skip
