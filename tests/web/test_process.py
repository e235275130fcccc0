"""How the dashboard's process begins and ends."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.fork_server import run_forked
from tests.support.processes import environment
from tests.support.serving import command, serving
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.web.__main__ import main


def logged_in(url: str, store: Store) -> httpx.Client:
    answer = httpx.post(f"{url}/login", data={"code": store.logins.new_code()}, trust_env=False)
    assert answer.status_code == 303
    return httpx.Client(base_url=url, timeout=60, trust_env=False, cookies=answer.cookies)


def test_it_says_when_it_listens_and_ends_with_open_streams(store: Store):
    with serving(store.url) as served, logged_in(served.url, store) as client:
        with client.stream("GET", "/api/v1/live") as news:
            lines = news.iter_lines()
            assert "id: 0" in [next(lines) for _ in range(3)]
            served.process.terminate()
            list(lines)  # the stream is ended, not broken off
        assert served.process.wait(60) == 0


def test_it_ends_with_its_parent(store: Store):
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([*sys.argv[1:], '--parent', str(os.getpid())])\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    line = [sys.executable, "-c", code, *command(store.url)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline().startswith("ready 127.0.0.1:")
        parent.stdin.close()
        assert parent.stdout.read() == ""  # comes when nobody holds the other end any more: the dashboard has ended


def test_a_port_that_is_taken_is_refused(store: Store):
    with serving(store.url) as served:
        ended = run_forked(command(store.url, served.address), 60, env=environment())
        assert ended.returncode == 4
        why = "the port is taken by another process\ntry:   --listen "
        assert ended.stderr.startswith(f"error: cannot listen on {served.address}\nwhy:   {why}")


def test_beyond_loopback_it_names_the_last_start_with_such_a_dashboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = AggregatorHome.under(tmp_path)
    place.lock.touch()
    StartOptions({"listen": "0.0.0.0:9443", "no_dashboard": True}).save(place.root)
    assert main(["--database", str(place.database), "--listen", "0.0.0.0:8080"]) == 2
    start = f"thinwire aggregator start --listen 0.0.0.0:9443 --dashboard 0.0.0.0:8080 --home {tmp_path}"
    assert f"try:   {start}, which issues one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place", ["anna:secret@host/name", "host/name?password=secret", "host/name?sslPassword=secret"]
)
def test_a_password_on_the_command_line_is_refused(place: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--database", f"postgresql+psycopg://{place}", "--listen", "127.0.0.1:0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --database has a password in it")
    assert "secret" not in said


def test_a_newer_database_is_refused(tmp_path: Path):
    path = tmp_path / "store.sqlite3"
    Store.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    ended = run_forked(command(str(path)), 60, env=environment())
    assert ended.returncode == 8
    assert "newer than this program" in ended.stderr


def test_the_dashboard_imports_neither_torch_nor_flower():
    code = "import sys, thinwire.web.app; print({'torch', 'flwr'} & {name.split('.')[0] for name in sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
