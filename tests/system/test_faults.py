"""What docs/explain/faults.md says of devices that freeze, lose their state, come twice or lose their worker.

Real processes; each test waits for what the journal says.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.frozen import children, frozen
from tests.support.processes import EXAMPLE, Site, kill, only_pi_a, shared_site
from tests.support.run_outcome import double_aggregations, lost_updates
from thinwire.core.events import (
    AssignmentDelivered,
    ClientFailed,
    RoundClosed,
    RoundOpened,
    StateLost,
    UpdateAccepted,
    UpdateDropped,
)

SMALL = ("cohort.wait_for=2", "local.steps=20")
LONG = ("run.rounds=500", *SMALL)  # until it is stopped


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An aggregator and pi-a, which no test of this file ends."""
    with shared_site(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    with only_pi_a(shared) as alone:
        yield alone


def stopped(site: Site, run_id: str) -> None:
    """The run is ended by a person; nothing was lost or counted twice until then."""
    assert site.typed("runs", "stop", run_id).returncode == 0
    assert site.until_done(run_id).status == "stopped", site.said()
    events = site.events(run_id)
    assert (double_aggregations(events), lost_updates(events)) == (0, 0)


def test_a_frozen_device_costs_its_deadline_and_what_it_sends_when_it_wakes_counts(site: Site) -> None:
    freezing = site.start_client("pi-b", 1, 2, step_s=0.1)
    run_id = site.begin(
        "cohort.deadline_s=6", "cohort.max_staleness=400", "local.partial=true", *LONG, "local.steps=100"
    )
    part = in_time_with_a_part_of_its_work(site, run_id, "pi-b")

    def delivered() -> list[AssignmentDelivered]:
        mine = [e for e in site.events(run_id) if isinstance(e, AssignmentDelivered) and e.device == "pi-b"]
        return [e for e in mine if e.round > part.round]

    site.until(delivered)
    now = sum(isinstance(e, RoundOpened) for e in site.events(run_id))
    with frozen(freezing.pid):
        (assigned,) = delivered()
        site.until_event(run_id, RoundClosed, round=assigned.round, reason="deadline", outstanding=["pi-b"])
        site.until_event(run_id, RoundClosed, count=now + 3)  # the others go on without it
    site.until_event(run_id, UpdateAccepted, assignment_id=assigned.assignment_id, late=True)
    stopped(site, run_id)
    events = site.events(run_id)
    assert "offline" not in [e.kind for e in events if isinstance(e, ClientFailed)]
    late = next(e for e in events if isinstance(e, UpdateAccepted) and e.assignment_id == assigned.assignment_id)
    between = [e for e in events[: events.index(late)] if isinstance(e, RoundOpened) and e.round > assigned.round]
    assert len(between) >= 3
    unanswered = [e for e in between if e.round < late.round]  # what came between two rounds is taken by the second
    assert [e.round for e in unanswered if "pi-b" in e.assignments] == [], (
        "it is not selected while it has not answered"
    )
    assert late.staleness >= 3
    assert late.discount == (1 + late.staleness) ** -0.5


def in_time_with_a_part_of_its_work(site: Site, run_id: str, device: str) -> UpdateAccepted:
    """An answer that counts in full, of a training that the deadline ended early enough for it to be sent."""

    def seen() -> list[UpdateAccepted]:
        mine = [e for e in site.events(run_id) if isinstance(e, UpdateAccepted) and e.device == device and not e.late]
        return [e for e in mine if 1 <= e.header["steps"] < e.header["planned"] == 100 and e.discount == 1.0]

    site.until(seen)
    return seen()[-1]


def test_a_device_that_is_killed_loses_nothing_with_its_state_and_begins_at_zero_without_it_or_with_an_older_one(
    site: Site,
) -> None:
    """What it had lost is recorded, once."""
    killed = site.start_client("pi-c", 1, 2)
    run_id = site.begin(*LONG)
    mine = site.home / "clients" / "pi-c" / "runs"
    copy = site.home.parent / "copy"

    def lost() -> list[StateLost]:
        return [e for e in site.events(run_id) if isinstance(e, StateLost)]

    site.until_event(run_id, RoundClosed, count=2)
    with frozen(killed.pid):
        shutil.copytree(mine, copy)
    for what in ("whole", "older", "missing"):
        now = len([e for e in site.events(run_id) if isinstance(e, RoundClosed)])
        site.until_event(run_id, RoundClosed, count=now + 2)
        told_before = len(lost())
        kill(killed)
        if what != "whole":
            shutil.rmtree(mine)
        if what == "older":
            shutil.copytree(copy, mine)
        again = len([e for e in site.events(run_id) if isinstance(e, RoundOpened)])
        killed = site.start_client("pi-c", 1, 2)
        if what == "whole":
            site.until(partial(accepted_after, site, run_id, "pi-c", again))
            assert lost() == []
        else:
            site.until_event(run_id, StateLost, device="pi-c", why=what)
            event = lost()[-1]
            (told,) = [
                e for e in site.events(run_id) if isinstance(e, UpdateAccepted) and e.update_id == event.update_id
            ]
            site.until_event(run_id, RoundClosed, round=told.round + 1)
            assert len(lost()) == told_before + 1, "it is told once"
    stopped(site, run_id)


def accepted_after(site: Site, run_id: str, device: str, round_: int) -> bool:
    """Whether an update for a later round was accepted of this device."""
    found = [e for e in site.events(run_id) if isinstance(e, UpdateAccepted) and e.device == device]
    return any(e.assignment_round > round_ for e in found)


def test_a_second_live_process_of_one_device_is_refused_and_the_first_goes_on(site: Site) -> None:
    first = site.processes[1]
    run_id = site.begin("run.rounds=500", "local.steps=20")
    site.until_event(run_id, RoundClosed)
    other = site.home.parent / "another"
    with frozen(first.pid):  # it writes and renames files all the time: none may go while it is copied
        shutil.copytree(site.home / "clients", other / "clients", ignore=shutil.ignore_patterns("downloads"))
    second = site.start(
        "client", "start", "--aggregator", f"http://{site.listen}", "--task", f"digits={EXAMPLE / 'task.py'}",
        "--name", "pi-a", home=other,
    )  # fmt: skip
    site.until(lambda: "another process" in site.log_of(second))
    now = len([e for e in site.events(run_id) if isinstance(e, RoundClosed)])
    site.until_event(run_id, RoundClosed, count=now + 3)
    kill(second)
    assert [e for e in site.events(run_id) if isinstance(e, (ClientFailed, StateLost))] == []
    stopped(site, run_id)


def test_a_worker_that_is_killed_fails_one_assignment_and_the_next_one_finds_a_fresh_one(site: Site) -> None:
    losing = site.start_client("pi-d", 1, 2, step_s=0.1)
    run_id = site.begin(*LONG, "cohort.min_updates=2", "cohort.retry_limit=1", "cohort.deadline_s=60")
    site.until(
        lambda: "round 2: train" in site.log_of(losing)
    )  # the journal has when it was selected, not that it trains
    for pid in children(losing.pid):
        os.kill(pid, signal.SIGKILL)
    site.until_event(run_id, ClientFailed, device="pi-d", kind="worker")
    failed = next(e for e in site.events(run_id) if isinstance(e, ClientFailed))
    site.until_event(run_id, RoundClosed, round=failed.round + 1)
    short, again = [e for e in site.events(run_id) if isinstance(e, RoundClosed)][failed.round - 1 :][:2]
    assert (short.reason, short.version, len(short.dropped)) == ("too-few", failed.round - 1, 1), "it was given back"
    assert (again.reason, again.version, len(again.aggregated)) == ("all", failed.round, 2), (
        "the same step was tried again"
    )
    site.until(
        lambda: any(
            e.device == "pi-d" and e.round > failed.round for e in site.events(run_id) if isinstance(e, UpdateAccepted)
        )
    )
    assert losing.poll() is None
    stopped(site, run_id)


def test_an_upload_that_is_cut_half_way_is_gone_on_with(site: Site) -> None:
    """The proxy cuts within the update's bytes; the round loses nothing by it."""
    from tests.support.proxy import proxy

    with proxy(site.listen) as line:
        site.start_client("pi-e", at=line.address)
        run_id = site.begin(*LONG, "uplink.codec='identity'", "uplink.feedback='none'")
        site.until_event(run_id, RoundClosed)
        line.up.cuts = [line.up.given + 20_000, line.up.given + 70_000]  # of 38 kB a round
        site.until(lambda: line.cut_count == 2)
        now = len([e for e in site.events(run_id) if isinstance(e, RoundOpened)])
        site.until_event(run_id, RoundClosed, round=now + 1)
        stopped(site, run_id)
    reasons = [e.reason for e in site.events(run_id) if isinstance(e, RoundClosed)]
    assert set(reasons) <= {"all", "stopped"}, "no answer was given up"


def test_an_update_that_is_sent_twice_counts_once_and_garbage_is_dropped(site: Site) -> None:
    site.start_client("pi-f", 1, 2, program=("tests.support.liar", "twice"))
    site.start_client("pi-g", 1, 2, program=("tests.support.liar", "garbage"))
    run_id = site.begin("run.rounds=500", "cohort.wait_for=3", "local.steps=20")
    site.until_event(run_id, UpdateDropped, device="pi-f", reason="duplicate")
    site.until_event(run_id, UpdateDropped, device="pi-g", count=2)
    site.until_event(run_id, RoundClosed, count=2)
    stopped(site, run_id)
    events = site.events(run_id)
    accepted = [e.assignment_id for e in events if isinstance(e, UpdateAccepted)]
    assert len(accepted) == len(set(accepted))
    dropped = {e.reason for e in events if isinstance(e, UpdateDropped) and e.device == "pi-g"}
    assert "bad-payload" in dropped
    aggregated = {u.split("/")[1] for e in events if isinstance(e, RoundClosed) for u in e.aggregated}
    assert aggregated == {"pi-a", "pi-f"}
