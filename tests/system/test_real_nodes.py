"""An aggregator on a real SuperLink and real client processes; processes die, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.frozen import children
from tests.support.processes import EXAMPLE, Site, kill, only_pi_a, shared_site
from thinwire.core.events import ClientFailed, FullModelSent, RoundClosed, RoundOpened, UpdateAccepted

SMALL = ("cohort.wait_for=2", "local.steps=20")


def aggregated_once(site: Site, run_id: str) -> None:
    """Nothing was aggregated twice, and everything that was accepted was aggregated or given back."""
    events = site.events(run_id)
    accepted = [e.update_id for e in events if isinstance(e, UpdateAccepted)]
    closed = [u for e in events if isinstance(e, RoundClosed) for u in (*e.aggregated, *e.dropped)]
    assert len(accepted) == len(set(accepted))
    assert len(closed) == len(set(closed))
    assert set(accepted) <= set(closed)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a dashboard, whose client pi-a no test ends."""
    folder = tmp_path_factory.mktemp("kept")
    with shared_site(folder, dashboard=True, forks=False) as made:  # these are started as a user starts them
        made.forks = True
        yield made


@pytest.fixture
def served(kept: Site) -> Iterator[Site]:
    with only_pi_a(kept) as alone:
        yield alone


def test_two_devices_train_and_the_model_comes_back_though_the_dashboard_is_killed_meanwhile(served: Site) -> None:
    aggregator = served.aggregator
    assert aggregator is not None
    served.until(lambda: children(aggregator.pid))
    (page,) = children(aggregator.pid)
    served.start_client("pi-b", 1, 2, step_s=0.1)  # so that the run is at work when the dashboard is killed
    run_id = served.begin("run.rounds=3", *SMALL)
    served.until_event(run_id, RoundOpened, round=2)
    os.kill(page, signal.SIGKILL)
    assert served.run(run_id).status == "running"
    row = served.until_done(run_id)
    served.until(lambda: children(aggregator.pid) - {page}, "the dashboard is started again")
    assert [e for e in served.events(run_id) if isinstance(e, ClientFailed)] == []
    assert (row.status, row.version, row.exit_code) == ("done", 3, 0), served.said()
    assert [e.reason for e in served.events(run_id) if isinstance(e, RoundClosed)] == ["all"] * 3
    assert row.metrics["accuracy"] > 0.3
    assert row.wire_up is not None
    assert row.payload_up < row.wire_up < row.dense_up
    shown = json.loads(served.typed("runs", "show", run_id, "--json").stdout)
    assert shown["model_digest"] == row.model_digest
    assert [r["reason"] for r in shown["rounds"]] == ["all"] * 3
    aggregated_once(served, run_id)


def test_an_aggregator_killed_in_a_round_goes_on_with_it_when_it_is_started_again(served: Site) -> None:
    first = served.aggregator
    assert first is not None
    served.start_client("pi-c", 1, 2)
    run_id = served.begin("run.rounds=6", *SMALL)
    served.until_event(run_id, UpdateAccepted, round=2)
    kill(first)
    opened = [e.round for e in served.events(run_id) if isinstance(e, RoundOpened)]
    second = served.start_aggregator()
    served.until_event(run_id, RoundClosed, count=4)
    kill(second)
    served.start_aggregator()
    row = served.until_done(run_id)
    assert (row.status, row.version) == ("done", 6), served.said()
    rounds = [e for e in served.events(run_id) if isinstance(e, RoundClosed)]
    assert [e.round for e in rounds] == [1, 2, 3, 4, 5, 6], "the open round was gone on with, none was begun again"
    assert opened[-1] in [e.round for e in rounds]
    aggregated_once(served, run_id)


def test_a_client_that_is_killed_costs_no_round_and_comes_back(served: Site) -> None:
    dying = served.start_client("pi-d", 1, 2, step_s=0.2)
    run_id = served.begin("run.rounds=5", *SMALL)
    served.until_event(run_id, RoundOpened, round=2)
    kill(dying)
    served.until_event(run_id, ClientFailed, device="pi-d", kind="offline")
    served.start_client("pi-d", 1, 2)
    row = served.until_done(run_id)
    assert (row.status, row.version) == ("done", 5), served.said()
    assert "deadline" not in [e.reason for e in served.events(run_id) if isinstance(e, RoundClosed)]
    aggregated_once(served, run_id)


def test_changes_of_the_model_outlive_a_kill_of_either_end_and_a_lost_disk(served: Site) -> None:
    first = served.aggregator
    assert first is not None
    dying = served.start_client("pi-e", 1, 2, step_s=0.1)
    run_id = served.begin("run.rounds=6", "downlink.codec='topk(0.05) > int8'", *SMALL)
    served.until_event(run_id, RoundClosed, round=1)
    served.until_event(run_id, RoundOpened, round=3)
    kill(dying)
    for file in served.home.rglob("clients/pi-e/**/replica-*"):
        file.unlink()
    kill(first)
    served.start_aggregator()
    served.start_client("pi-e", 1, 2)
    row = served.until_done(run_id)
    assert (row.status, row.version) == ("done", 6), served.said()
    assigned = [e for e in served.events(run_id) if isinstance(e, FullModelSent)]
    assert {e.device for e in assigned} == {"pi-e"}
    assert row.payload_down < row.dense_down / 2
    aggregated_once(served, run_id)


def test_another_key_for_a_known_name_is_refused(served: Site) -> None:
    other = served.call(
        "client", "start", "--aggregator", f"http://{served.listen}", "--task", f"digits={EXAMPLE / 'task.py'}",
        "--name", "pi-a", "--once", home=served.home.parent / "another",
    )  # fmt: skip
    assert other.returncode == 5, other.stderr
    assert "pi-a" in other.stdout + other.stderr


def test_a_run_waits_for_its_devices_and_says_who_is_missing(served: Site) -> None:
    run_id = served.begin("run.rounds=1", 'cohort.wait_for=["pi-a", "pi-z"]')
    served.until(lambda: "missing pi-z" in served.run(run_id).status_text)
    assert served.run(run_id).status_text == "waiting: 1 of 2 devices (missing pi-z)"
    assert served.typed("runs", "stop", run_id).returncode == 0
    row = served.until_done(run_id)
    assert (row.status, row.exit_code) == ("stopped", 10)


def test_two_aggregators_in_one_folder_are_refused(served: Site) -> None:
    second = served.call("aggregator", "start", "--no-dashboard", "--listen", "127.0.0.1:0")
    assert served.aggregator is not None
    assert second.returncode == 1
    assert f"runs here already: process {served.aggregator.pid}, its device API at {served.listen}" in second.stderr


def test_without_an_aggregator_run_says_how_to_start_one_and_once_gives_up(site: Site) -> None:
    assigned = site.call("run", str(EXAMPLE / "plan.toml"))
    assert assigned.returncode == 4
    assert "thinwire aggregator start" in assigned.stderr
    client = site.call(
        "client", "start", "--aggregator", f"http://{site.listen}", "--task", f"digits={EXAMPLE / 'task.py'}", "--once"
    )
    assert client.returncode == 4
    assert "error" in client.stdout + client.stderr


def test_an_aggregator_ends_when_told_and_its_run_waits(site: Site) -> None:
    running = site.start_aggregator()
    site.start_client("pi-a")
    run_id = site.begin("run.rounds=500", "local.steps=5")
    site.until_event(run_id, RoundClosed, count=2)
    assert site.typed("aggregator", "stop").returncode == 0
    assert running.wait(60) == 0
    assert site.run(run_id).status == "running"
