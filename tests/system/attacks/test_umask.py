"""A umask that hides nothing: what other users of the machine could read or write of a state directory."""

from __future__ import annotations

import csv
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import Forked
from tests.support.processes import Site, environment
from thinwire.cli.main import main
from thinwire.core.statedir import AggregatorHome, client_home
from thinwire.store import Store
from thinwire.transport.device.identity import device_key


def open_to_others(*roots: Path) -> list[str]:
    """Each path below `roots`, and they themselves, that other users may read, write or enter."""
    found = [path for root in roots for path in (root, *root.rglob("*"))]
    return sorted(f"{path} {path.lstat().st_mode & 0o777:o}" for path in found if path.lstat().st_mode & 0o077)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """All that is started and typed here has a umask of 0."""
    (tmp_path / "new").mkdir(mode=0o755)
    made, before = Site(tmp_path / "new" / "state"), os.umask(0)
    made.page = ("--dashboard", made.dashboard_at)
    yield made
    made.close()
    os.umask(before)


def typed(site: Site, *words: str) -> str:
    done = site.typed(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_no_umask_opens_a_state_directory(site: Site, monkeypatch: pytest.MonkeyPatch):
    """Over TLS, with every kind of thing that lies there, looked at while all is running and when it has ended."""
    port = site.listen.rpartition(":")[2]
    site.listen = f"0.0.0.0:{port}"
    aggregator = site.start_aggregator("--san", "127.0.0.1")
    invites, backup, other = (site.home.parent / name for name in ("invites.csv", "backup", "restored"))
    assert "tw1." not in typed(site, "devices", "invite", "--out", str(invites))
    (row,) = csv.DictReader(invites.read_text().splitlines())
    assert row["invitation"] not in row["command"]
    monkeypatch.setenv("THINWIRE_INVITE", row["invitation"])
    typed(site, "client", "join", f"https://127.0.0.1:{port}", "-", "--name", "pi-01")
    task = f"digits={site.example / 'task.py'}"
    run_id = site.begin("run.rounds=1", "cohort.clients=1")
    site.start("client", "start", "--name", "pi-01", "--task", task)
    assert site.until_done(run_id).status == "done"
    typed(site, "aggregator", "backup", str(backup))
    assert open_to_others(site.home, invites, backup) == []
    site.close()
    said = site.log_of(aggregator)  # what a service says goes to a journal
    assert "code=" not in said
    assert f"thinwire aggregator status --login --home {site.home}" in said
    plan, sizes = str(site.example / "plan.toml"), ("--set", "run.rounds=1", "--clients", "2")
    typed(site, "sim", plan, *sizes, "--task", task, "--seeds", "2", "--name", "two")
    assert main(["aggregator", "restore", str(backup), "--home", str(other)]) == 0
    assert open_to_others(site.home, other) == []


def test_a_state_directory_that_was_open_is_closed_with_a_warning(site: Site, caplog: pytest.LogCaptureFixture):
    with Store.open(AggregatorHome.under(site.home).database):
        key = client_home(site.home, "pi-01") / "key.pem"
    device_key(key.parent)
    said = [site.home, site.home / "aggregator", site.home / "aggregator" / "store.sqlite3", key.parent, key]
    for path in said:
        path.chmod(0o777)
    with Store.open(AggregatorHome.under(site.home).database):
        device_key(client_home(site.home, "pi-01"))
    assert [path for path in said if f"other users could use {path} (mode 777)" in caplog.text] == said[1:]
    assert f"other users could write into {site.home} (mode 777)" in caplog.text
    assert stat.S_IMODE(site.home.stat().st_mode) == 0o755  # who named it may let others look at its names
    assert open_to_others(*site.home.iterdir()) == []
    site.home.chmod(0o1777)  # as /tmp has it: nobody there can take the place of what is another's
    AggregatorHome.under(site.home)
    assert stat.S_IMODE(site.home.stat().st_mode) == 0o1777


def test_a_terminal_is_shown_at_once_that_it_starts_and_then_a_login_code(site: Site):
    (master, slave), said = os.openpty(), b""
    words = ["aggregator", "start", "--listen", site.listen, *site.page, "--home", str(site.home)]
    command = [sys.executable, "-m", "thinwire.cli", *words]
    with Forked(command, stdout=slave, stderr=slave, env=environment()) as process:
        os.close(slave)
        while b"/login?code=" not in said:
            said += os.read(master, 4096)  # OSError when it ended
        process.terminate()
    assert said.startswith(b"starting the aggregator ...\r\n")
    os.close(master)
