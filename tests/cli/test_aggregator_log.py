"""What the aggregator reports in its log as it happens, and what it leaves out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.store_story import new_run
from thinwire.cli.aggregator.serve import Reporter
from thinwire.core.events import (
    ClientFailed,
    DeviceOffline,
    DeviceOnline,
    Evaluated,
    Event,
    RoundClosed,
    RunStatusChanged,
)
from thinwire.core.run_events import SHOWN_OF_SAMPLED, without_sample
from thinwire.store import Store
from thinwire.store.journal import KINDS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.sqlite3") as opened:
        yield opened


def closed(reason: str) -> RoundClosed:
    return RoundClosed(1.0, 3, reason, 2, ["a"], ["b"], [], 0.0, 12.0, {})  # type: ignore[arg-type]  # a reason


def test_devices_runs_and_rounds_without_a_step_are_reported(store: Store):
    run_id = new_run(store)
    lines: list[str] = []
    reporter = Reporter(store, lines.append)
    reporter.event("", DeviceOnline(1.0, "pi-01"))
    reporter.event("", DeviceOffline(1.0, "pi-01", "its connection was lost", 0.0))
    reporter.event(run_id, RunStatusChanged(1.0, "running", ""))
    reporter.event(run_id, RunStatusChanged(1.0, "running", "round 2, step 2 of 4"))  # so each round begins
    reporter.event(run_id, closed("all"))
    reporter.event(run_id, closed("too-few"))
    reporter.event(run_id, Evaluated(1.0, 3, 2, {"accuracy": 0.5}, {}, 40, 2))
    reporter.event(run_id, RunStatusChanged(1.0, "done", "20 rounds"))
    assert lines == [
        "pi-01 is online",
        "pi-01 is offline: its connection was lost",
        f"{run_id}: running",
        f"{run_id}: round 3 ended without a step (too-few), after 12.0 s: 2 updates",
        f"{run_id}: done: 20 rounds",
    ]


def test_a_failure_is_reported_when_it_is_new_and_not_that_an_assignment_outlived_its_run(store: Store):
    run_id = new_run(store)
    lines: list[str] = []
    reporter = Reporter(store, lines.append)
    for number, (kind, text) in enumerate([("task", "no data"), ("task", "no data"), ("task", "nan"), ("over", "")]):
        reporter.event(run_id, ClientFailed(1.0, number, "pi-01", f"{run_id}.{number}.pi-01", kind, text, 0.0))
    assert lines == [f"{run_id}: pi-01 task: no data", f"{run_id}: pi-01 task: nan"]


def test_nobody_reads_in_the_log_who_was_sampled(store: Store, monkeypatch: pytest.MonkeyPatch):
    run_id = new_run(store)
    lines: list[str] = []
    monkeypatch.setattr("thinwire.cli.aggregator.serve.is_sampled", lambda plan: True)
    reporter = Reporter(store, lines.append)
    reporter.event(run_id, ClientFailed(1.0, 1, "pi-01", f"{run_id}.1.pi-01", "task", "no data", 0.0))
    assert lines == []
    reporter.event(run_id, closed("too-few"))
    assert lines == [f"{run_id}: round 3 ended without a step (too-few), after 12.0 s"]


def test_what_people_and_devices_did_to_the_registry_is_reported_once(store: Store):
    lines: list[str] = []
    reporter = Reporter(store, lines.append)
    store.roster.add("pi-01", b"key of pi-01", "manual")
    reporter.actions()
    reporter.actions()
    assert lines == ["pi-01 is known now"]
    store.roster.rename("pi-01", "lab-01")
    reporter.actions()
    assert lines[1:] == ["lab-01 is a new name: it was pi-01 before"]


def test_the_cause_is_reported_before_a_device_is_online_or_offline(store: Store):
    lines: list[str] = []
    reporter = Reporter(store, lines.append)
    store.roster.add("pi-01", b"key of pi-01", "manual")
    reporter.event("", DeviceOnline(1.0, "pi-01"))
    store.revoke_device("pi-01", "ann", "", lambda: False)
    reporter.event("", DeviceOffline(1.0, "pi-01", "revoked", 0.0))
    reporter.actions()
    assert lines == ["pi-01 is known now", "pi-01 is online", "pi-01 is revoked by ann", "pi-01 is offline: revoked"]


def test_the_kinds_that_a_sampled_run_shows_are_those_of_which_something_is_left():
    def some(kind: type[Event]) -> Event:
        event = object.__new__(kind)
        given = {"at": 0.0, "elapsed_s": 0.0, "seconds": 0.0, "population": "p", "release": {"kind": "sum"}}
        vars(event).update({one.name: given.get(one.name) for one in dataclasses.fields(kind)})

        return event

    assert {kind for kind in KINDS.values() if without_sample(some(kind)) is not None} == {*SHOWN_OF_SAMPLED}
