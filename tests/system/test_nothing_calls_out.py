"""A whole run, page and a look at everything with all of the network denied but this machine's own addresses."""

from __future__ import annotations

import json
import sys
import urllib.request

import pytest

from tests.support import no_calls_out
from tests.support.fork_server import begun_with, run_forked
from tests.support.processes import THE_DEMOS, Site, environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All processes of these tests are forked by one that began with the hook, so that each of them has it."""
    made = tmp_path_factory.mktemp("denied")
    hooked = no_calls_out.environment(made)
    with pytest.MonkeyPatch.context() as patched, begun_with(hooked):
        for name, value in hooked.items():
            patched.setenv(name, value)
        for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
            patched.delenv(name, raising=False)
        yield made


@pytest.fixture
def denied(folder):
    (folder / "calls.txt").write_text("")
    return lambda: no_calls_out.calls(folder)


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('192.0.2.1', 9), timeout=1)",
        "import socket; socket.getaddrinfo('agg.example', 9)",
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://agg.example/')",
        "import httpx; httpx.get('http://192.0.2.1/')",
    ],
)
def test_a_call_that_leaves_this_machine_would_be_found(denied, code):
    done = run_forked([sys.executable, "-c", code], 60, env=environment())
    assert done.returncode != 0
    assert [line for line in denied() if line.startswith("OUT")]


def test_nothing_calls_out_but_to_the_device_api(tmp_path, denied):
    site = Site(tmp_path / "home")
    try:
        site.page = ("--dashboard", site.dashboard_at)
        site.start_aggregator("--san", "localhost")
        (invited,) = json.loads(site.call("devices", "invite", "--json").stdout)
        joined = site.call("client", "join", invited["url"], invited["invitation"], "--name", "pi-01")
        assert joined.returncode == 0, joined.stderr
        site.start("client", "start", "--task", f"digits={THE_DEMOS / 'task.py'}", "--name", "pi-01")
        queued = site.call("run", str(THE_DEMOS / "plan.toml"), "--set", "run.rounds=2", "--detach", "--json")
        run_id = json.loads(queued.stdout)["run_id"]
        assert site.until_done(run_id).status == "done"
        login = json.loads(site.call("aggregator", "status", "--login", "--json").stdout)["login"]
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(login) as answer:
            assert b"thinwire" in answer.read().lower()
        assert site.call("client", "doctor").returncode == 0
        for words in (
            ("aggregator", "doctor"),
            ("aggregator", "status"),
            ("runs", "show", run_id),
            ("devices", "list"),
        ):
            assert site.call(*words).returncode == 0, words
    finally:
        site.close()
    assert [line for line in denied() if line.startswith("OUT")] == []
    ports = {line.split("'127.0.0.1', ")[1].split(")")[0] for line in denied() if " socket.connect (" in line}
    assert ports == {site.listen.rpartition(":")[2], site.dashboard_at.rpartition(":")[2]}, denied()
