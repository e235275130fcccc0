"""A plan that wants more devices than are known is refused, or a person at a terminal decides."""

from __future__ import annotations

import os
import pty
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import Forked
from tests.support.processes import PATIENCE_S, Site, environment
from thinwire.cli.run import begins_early, too_many
from thinwire.core import RunPlan

SECURE = Path(__file__).parents[2] / "examples" / "digits" / "secure.toml"


@pytest.fixture
def site(tmp_path: Path):
    site = Site(tmp_path / "home")
    site.start_aggregator()
    yield site
    site.close()


def plan_with(secure: bool = False, **cohort: Any) -> RunPlan:
    return RunPlan.from_json(
        {"run": {"task": "digits"}, "local": {"lr": 0.1}, "cohort": cohort, "secure": {"enabled": secure}}
    )


def runs(site: Site) -> list[str]:
    with site.store() as store:
        return [row.run_id for row in store.runs()]


def answered(site: Site, answer: str) -> tuple[int, str]:
    """What `thinwire run` gives at a terminal where this is typed."""
    ours, theirs = pty.openpty()
    command = ["thinwire.cli", "run", str(site.example / "plan.toml"), "--set", "cohort.clients=3", "--detach"]
    process = Forked(
        [sys.executable, "-m", *command, "--home", str(site.home)], stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"[y/N]" not in said:
        assert select.select([ours], [], [], PATIENCE_S)[0], said
        said += os.read(ours, 4096)
    os.write(ours, answer.encode() + b"\n")
    code = process.wait(PATIENCE_S)
    os.close(ours)
    return code, said.decode()


def test_it_is_refused_where_nobody_can_decide_and_yes_submits_it(site: Site):
    plan = [str(site.example / "plan.toml"), "--set", "cohort.clients=3", "--detach"]
    refused = site.call("run", *plan)
    assert refused.returncode == 6
    assert "the plan selects 3 devices a round, and 0 are known" in refused.stderr
    assert f"again when all are in the list of thinwire devices list --home {site.home}; " in refused.stderr
    assert "or --yes to submit it and wait" in refused.stderr
    assert runs(site) == []
    masked = site.call("run", str(SECURE), "--detach")
    assert (masked.returncode, runs(site)) == (6, [])
    assert "the plan needs 3 devices for secure aggregation, and 0 are known" in masked.stderr
    assert "[secure] enabled = false; or --yes to submit it and wait" in masked.stderr
    said = site.call("run", *plan, "--yes")
    assert (said.returncode, runs(site)) == (0, ["digits-1"])
    start = f"thinwire client start --aggregator http://{site.listen} --task"
    assert (
        f"no device has joined yet; to add one: {start} digits=MODULE --name NAME --home {site.home}\n" in said.stderr
    )
    assert f"no devices yet; to add one: {start} NAME=MODULE --name NAME" in site.call("devices", "list").stderr


def test_a_person_at_a_terminal_decides(site: Site):
    code, said = answered(site, "n")
    assert (code, runs(site)) == (130, [])
    assert "and 0 are known. Submit it, and wait for the others?" in said
    code, _ = answered(site, "y")
    assert (code, runs(site)) == (0, ["digits-1"])


@pytest.mark.parametrize(
    ("cohort", "lacking"),
    [
        ({}, {}),
        ({"clients": 0.5, "min_updates": 0.9, "wait_for": 2}, {}),
        ({"clients": 2, "wait_for": ["a", "b"], "min_updates": 2}, {}),
        ({"clients": 3, "wait_for": 2}, {"clients": "selects 3 devices a round"}),
        ({"wait_for": 3}, {"wait_for": "waits for 3 devices"}),
        ({"wait_for": ["a", "c", "d"]}, {"wait_for": "waits for c, d (not known)"}),
        ({"wait_for": list("cdefg")}, {"wait_for": "waits for c, d, e and 2 more (not known)"}),
        ({"min_updates": 3}, {"min_updates": "needs 3 updates a step"}),
        ({"secure": True}, {"[secure] enabled": "needs 3 devices for secure aggregation"}),
        ({"secure": True, "clients": 0.4}, {"[secure] enabled": "needs 6 devices for secure aggregation"}),
    ],
)
def test_each_key_that_wants_more_than_the_two_known_devices_is_named(cohort: Any, lacking: dict[str, str]):
    assert too_many(plan_with(**cohort), {"a", "b"}) == lacking


def test_the_default_waits_for_the_first_device_that_joins():
    assert too_many(plan_with(), set()) == {}


def test_a_run_that_waits_for_few_says_with_how_many_it_begins():
    assert begins_early(plan_with(), 1) == ""
    assert begins_early(plan_with(clients=3)) == begins_early(plan_with(wait_for=2), 5) == ""
    early = "the run begins as soon as 1 device is connected; [cohort] wait_for = N waits for more"
    assert begins_early(plan_with()) == early
    early = "the run begins as soon as 3 devices of 5 are connected; [cohort] wait_for = 5 waits for all of them"
    assert begins_early(plan_with(secure=True), 5) == early
    assert begins_early(plan_with(secure=True), 3) == ""
