"""A plan that selects more devices than are known is refused, or a person at a terminal decides."""

from __future__ import annotations

import os
import pty
import select
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import Forked
from tests.support.processes import PATIENCE_S, Site, environment


@pytest.fixture
def site(tmp_path: Path):
    site = Site(tmp_path / "home")
    site.start_aggregator()
    yield site
    site.close()


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
    assert "--yes" in refused.stderr
    assert runs(site) == []
    assert site.call("run", *plan, "--yes").returncode == 0
    assert runs(site) == ["digits-1"]


def test_a_person_at_a_terminal_decides(site: Site):
    code, said = answered(site, "n")
    assert (code, runs(site)) == (130, [])
    assert "and 0 are known. Submit it, and wait for the others?" in said
    code, _ = answered(site, "y")
    assert (code, runs(site)) == (0, ["digits-1"])
