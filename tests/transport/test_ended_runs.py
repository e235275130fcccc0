"""A device that was offline when a run ended learns it when it registers, and only from the run's own aggregator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fleet_words import hello, polled, pulled
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import ClientConnected, Envelope, Welcome
from thinwire.core.types import Assignment
from thinwire.transport.protocol import registration

OURS, ANOTHERS = "a" * 16, "b" * 16


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def test_a_welcome_ends_the_runs_whose_identity_the_aggregator_knows_and_no_others(here: Place) -> None:
    here.roster.over = {"toy-1": OURS, "toy-2": OURS, "toy-4": OURS}
    link = here.link("pi-1")
    kept = {"toy-1": OURS, "toy-2": ANOTHERS, "toy-3": OURS}
    assert link.hello(replace(hello("pi-1"), open_runs=kept)).ended == ("toy-1",)
    stop = pulled(link)
    assert (stop.assignment.kind, stop.assignment.run, stop.assignment.task, stop.assignment.identity) == (
        "stop",
        "toy-1",
        "toy",
        OURS,
    )
    assert stop.missed
    assert link.pull(0.1) is None


def test_a_device_whose_aggregator_restarts_learns_the_end_of_the_run_in_which_it_had_an_assignment(
    here: Place,
) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    polled(here.fleet, ClientConnected)
    here.roster.identities = {"toy-1": OURS}
    here.fleet.send([Envelope("pi-1", Assignment("toy-1.1.pi-1", "toy-1", "toy", "train", "", round=1, identity=OURS))])
    assert pulled(link).assignment.kind == "train"
    here.roster.identities, here.roster.over = {}, {"toy-1": OURS}
    here.restart()
    stop = pulled(link)
    assert (stop.assignment.kind, stop.assignment.run, stop.missed) == ("stop", "toy-1", True)
    here.restart()
    assert link.pull(0.1) is None, "it knows it now"


def test_an_aggregator_cannot_end_a_run_that_the_device_did_not_name(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.roster, "ended", lambda runs: ("toy-1", "toy-2"))
    link = here.link("pi-1")
    link.hello(replace(hello("pi-1"), open_runs={"toy-2": OURS}))
    assert pulled(link).assignment.run == "toy-2"
    assert link.pull(0.1) is None


def test_both_lists_are_bounded() -> None:
    runs = {f"toy-{number}": OURS for number in range(100)}
    said = registration.hello_from_bytes(registration.to_bytes(replace(hello("pi-1"), open_runs=runs)))
    assert len(said.open_runs) == registration.MAX_RUNS
    told = registration.welcome_from_bytes(registration.to_bytes(Welcome("pi-1", ended=tuple(runs))))
    assert len(told.ended) == registration.MAX_RUNS
