"""A person stops a run after its round: the open round ends, then the run does, also when the service was restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.several_runs import Site, steady
from thinwire.core.events import Event, RoundClosed, RoundOpened, RunStatusChanged, UpdateAccepted
from thinwire.server import command_queue


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read at each poll, because the virtual clock does not wait for real seconds."""
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)


def ordering(site: Site, run_id: str, number: int) -> None:
    """Give the command once the first update of this round was accepted."""
    given = list[int]()

    def on_event(of: str, event: Event) -> None:
        if of == run_id and isinstance(event, UpdateAccepted) and event.round == number and not given:
            given.append(site.store.command_run("stop-after-round", run_id, "ann"))

    site.on_event = on_event


def closings(site: Site, run_id: str) -> list[tuple[int, str]]:
    return [(event.round, event.reason) for event in site.events(run_id, RoundClosed)]


def test_the_open_round_ends_with_all_its_updates_and_no_other_opens(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 5.0}))
    run_id, other = site.submit(run={"rounds": 6}), site.submit(run={"rounds": 3, "seed": 1})
    ordering(site, run_id, 2)
    site.serve()
    row = site.store.run(run_id)
    assert (row.status, row.exit_code, row.version) == ("stopped", 10, 2)
    assert row.status_text == "stopped by a person after 2 of 6 rounds"
    assert closings(site, run_id) == [(1, "all"), (2, "all")]
    assert site.store.run(other).status == "done"
    assert not site.store.commands.pending()


def test_the_command_survives_a_restart_in_the_middle_of_the_round(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 60.0}))
    run_id = site.submit(run={"rounds": 6}, cohort={"min_updates": 1.0, "deadline_s": 100})
    ordering(site, run_id, 1)
    site.serve(seconds=20.0)
    assert site.store.run(run_id).status == "running", "the round waits for the slow device"
    site.serve()
    assert site.store.run(run_id).status == "stopped"
    assert closings(site, run_id) == [(1, "all")]


def test_a_run_that_is_paused_or_has_not_begun_has_no_round_and_stops_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    first, queued = site.submit(run={"rounds": 4}), site.submit(run={"seed": 1})
    site.store.command_run("stop-after-round", queued)
    site.store.command_run("pause", first)
    site.serve(seconds=30.0, max_runs=1)
    site.store.command_run("stop-after-round", first)
    site.serve(seconds=30.0, max_runs=1)
    assert [site.store.run(run_id).status for run_id in (first, queued)] == ["stopped", "stopped"]
    assert not site.events(queued, RoundOpened)


def test_in_the_last_round_it_changes_nothing_and_the_last_model_is_measured(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 2.0}))
    run_id = site.submit(run={"rounds": 2})
    ordering(site, run_id, 2)
    site.serve()
    assert site.events(run_id, RunStatusChanged)[-1].text == "2 rounds"
    row = site.store.run(run_id)
    assert (row.status, row.metrics) == ("done", {"loss": 2.0})
    assert not site.store.commands.pending()


def test_a_pipelined_run_ends_after_its_current_round(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.5}))
    run_id = site.submit(run={"rounds": 8}, local={"lr": 1.0, "overlap": {"max_delay": 2}})
    ordering(site, run_id, 3)
    site.serve()
    row = site.store.run(run_id)
    assert (row.status, row.version) == ("stopped", 3)
    assert [reason for _, reason in closings(site, run_id)[:3]] == ["all"] * 3
    assert {reason for _, reason in closings(site, run_id)[3:]} <= {"stopped"}
