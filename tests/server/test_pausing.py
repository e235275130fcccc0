"""A person pauses a run: its open round ends, no device gets an assignment of it, and its clock stands still."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.server.test_private_rounds import Silent
from tests.support.crashes import Fate, each_death
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.server_bench import LAYOUT, change, every
from tests.support.several_runs import Site, steady
from thinwire.core.events import Event, RoundClosed, RoundOpened, RunStatusChanged, UpdateAccepted
from thinwire.server import command_queue
from thinwire.store import RunCommand, RunRow, Store


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read at each poll, because the virtual clock does not wait for real seconds."""
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)


def pausing(site: Site, run_id: str, closed: int) -> None:
    """Command a pause when so many rounds of the run are closed."""

    def on_event(of: str, event: Event) -> None:
        if of == run_id and isinstance(event, RoundClosed) and event.round == closed:
            site.store.commands.add("pause-run", run_id)

    site.on_event = on_event


def test_a_paused_run_stands_still_while_another_one_goes_on_with_its_devices(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.5}))
    paused, other = site.submit(run={"rounds": 6}), site.submit(run={"seed": 1, "rounds": 6})
    pausing(site, paused, closed=2)
    site.serve(seconds=100.0)
    assert [site.store.run(run_id).status for run_id in (paused, other)] == ["paused", "done"]
    assert site.store.run(paused).status_text == "paused by a person after 2 of 6 rounds"
    assert not site.store.commands.pending()
    site.store.commands.add("resume-run", paused)
    site.serve()
    row = site.store.run(paused)
    assert (row.status, row.rounds_closed) == ("done", 6)
    rounds = site.events(paused, RoundOpened)
    assert rounds[2].at - rounds[1].at > 50.0 > rounds[2].elapsed_s, "the run's clock stood still"


def test_a_run_stays_paused_over_a_restart_and_is_resumed_or_stopped_by_the_next_service(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.5}))
    runs = [site.submit(run={"rounds": 5, "seed": seed}) for seed in range(2)]
    for run_id in runs:
        site.store.commands.add("pause-run", run_id)
    site.serve(seconds=50.0)
    site.serve(seconds=50.0)
    assert {site.store.run(run_id).status for run_id in runs} == {"paused"}
    assert not site.events(runs[0], RoundOpened)
    site.store.commands.add("resume-run", runs[0])
    site.store.commands.add("stop-run", runs[1])
    site.serve(seconds=100.0)  # a run without a driver ends unheard, and the clock would go on for hours
    assert [site.store.run(run_id).status for run_id in runs] == ["done", "stopped"]


def test_a_paused_run_that_is_stopped_says_so_and_notifies_its_devices(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    run_id = site.submit(run={"rounds": 4})
    pausing(site, run_id, closed=1)
    site.serve(seconds=30.0)
    site.store.commands.add("stop-run", run_id)
    site.serve(seconds=30.0)
    last = site.events(run_id, RunStatusChanged)[-1]
    assert (last.status, last.exit_code) == ("stopped", 10)
    assert len(site.events(run_id, RoundClosed)) == 1


@pytest.mark.parametrize("closed", [0, 1])
def test_a_sampled_run_that_is_stopped_without_a_driver_notifies_all_devices_once_it_has_begun(
    tmp_path: Path, closed: int
) -> None:
    """No table has its devices, and to notify those of its samples would tell who they were."""
    devices = [AttentiveDevice(name, Silent(name, LAYOUT, partial(change, name)), every(1.0)) for name in "abc"]
    site = Site(tmp_path, devices)
    run_id = site.submit(
        run={"rounds": 4, "evaluate": "off"}, cohort={"late": "drop", "deadline_s": 5.0},
        local={"lr": 1.0, "steps": 5, "buffers": "local"}, uplink={"codec": "identity"},
        privacy={"mode": "central", "clip": 2.0, "noise_multiplier": 4.0, "delta": 1e-3, "sampling_rate": 0.3},
    )  # fmt: skip
    pausing(site, run_id, closed)
    if not closed:
        site.store.commands.add("pause-run", run_id)
    site.serve(seconds=30.0)
    assert site.store.run(run_id).status == "paused"
    other = site.submit()

    def on_event(of: str, event: Event) -> None:
        if of == other and isinstance(event, RoundOpened) and event.round == 1:  # all devices are connected
            site.store.commands.add("stop-run", run_id)

    site.on_event = on_event
    site.serve(seconds=100.0)
    assert site.store.run(run_id).status == "stopped"
    stops = [envelope for envelope in site.fleet.sent if envelope.assignment.kind == "stop"]
    assert sorted(one.device for one in stops if one.assignment.run == run_id) == (["a", "b", "c"] if closed else [])


def test_a_run_that_was_stopped_while_it_was_paused_goes_on_when_it_is_extended(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.5}))
    run_id, _ = site.submit(run={"rounds": 6}), site.submit(run={"seed": 1, "rounds": 30})
    commands_at = {"paused": ("stop-run", {}), "stopped": ("extend-run", {"rounds": 2, "sets": {}})}

    def on_event(of: str, event: Event) -> None:
        if of == run_id and isinstance(event, RoundClosed) and event.round == 2:
            site.store.commands.add("pause-run", run_id)
        elif of == run_id and isinstance(event, RunStatusChanged) and event.status in commands_at:
            kind, args = commands_at.pop(event.status)
            site.store.commands.add(kind, run_id, args)

    site.on_event = on_event
    site.serve()
    row = site.store.run(run_id)
    assert (commands_at, row.status, row.rounds_closed, row.rounds_total) == ({}, "done", 4, 4)


def test_a_run_that_waits_for_devices_can_be_paused(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    run_id = site.submit(cohort={"wait_for": ["nobody"]})
    site.store.commands.add("pause-run", run_id)
    site.serve(seconds=10.0)
    assert site.store.run(run_id).status == "paused"


def test_a_reply_that_waits_for_a_paused_run_costs_no_read_at_each_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "slow": 100.0}))
    run_id = site.submit(cohort={"deadline_s": 10})
    pausing(site, run_id, closed=1)
    site.serve(seconds=30.0)
    read, reads = Store.run, list[str]()

    def counted(store: Store, name: str) -> RunRow:
        reads.append(name)
        return read(store, name)

    monkeypatch.setattr(Store, "run", counted)
    site.serve(seconds=300.0)
    (kept,) = site.fleet.spool.headers()
    assert kept.update_id.device == "slow"
    assert len(reads) < 200, "two hundred seconds have 800 polls"
    site.store.commands.add("stop-run", run_id)
    site.serve(seconds=30.0)
    assert not site.fleet.spool.headers()


def lives(folder: Path, fate: Fate) -> tuple[Site, range]:
    """Two runs, of which one is paused in its round and then resumed; return the places between the commands."""
    site, commanded = Site(folder, steady({"a": 1.0, "b": 1.4, "c": 5.0}), fate), list[int]()
    paused, _ = site.submit(), site.submit(run={"seed": 1, "priority": 2.0}, cohort={"clients": 2})

    def on_event(of: str, event: Event) -> None:
        if of == paused and isinstance(event, UpdateAccepted) and event.round == 2 and not commanded:
            site.store.command_run("pause", paused)
            commanded.append(len(fate.places) + 1)

    site.on_event = on_event
    site.serve(seconds=60.0)
    assert [site.store.run(run_id).status for run_id in site.runs] == ["paused", "done"]
    assert site.store.run(paused).rounds_closed == site.store.round_count(paused)[0] == 2, "a paused run has no round"
    site.store.command_run("resume", paused)
    commanded.append(len(fate.places) + 1)
    site.serve()
    return site, range(*commanded)


def test_a_crash_at_each_commit_of_a_run_that_is_paused_in_its_round_changes_nothing(tmp_path: Path) -> None:
    site, since = lives(tmp_path / "undisturbed", fate := Fate())
    results = [site.result(run_id) for run_id in site.runs]
    commits = [at for at in since if fate.places[at - 1] == "commit"]

    def check(lived: tuple[Site, range], where: str) -> None:
        assert [lived[0].result(run_id) for run_id in site.runs] == results, where

    assert each_death(tmp_path, commits, lives, check) == len(commits) > 5


@pytest.mark.parametrize(("verb", "status"), [("pause", "paused"), ("stop-after-round", "stopped")])
def test_a_run_that_must_wait_for_its_turn_after_a_restart_ends_its_open_round_first(
    tmp_path: Path, verb: RunCommand, status: str
) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("abcd", 10.0)))
    _, run_id = (site.submit(run={"seed": seed}, cohort={"clients": 2}) for seed in range(2))
    site.serve(seconds=5.0)
    assert site.store.open_rounds(run_id, 1, 1), "both runs have an open round when the service dies"
    site.store.command_run(verb, run_id)
    site.serve(seconds=100.0, memory_bytes=1)
    assert site.store.run(run_id).status == status
    assert [(event.round, event.reason) for event in site.events(run_id, RoundClosed)] == [(1, "all")]
    assert not site.store.commands.pending()
