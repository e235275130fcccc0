"""The service as a process: what it prints, where it is found, how it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import free_port
from tests.support.fork_server import Forked, forking, run_forked
from tests.support.processes import environment
from tests.support.server_bench import LAYOUT
from thinwire import __version__
from thinwire.cli import local_state
from thinwire.cli.aggregator import dashboard, serve
from thinwire.cli.params import Address
from thinwire.cli.systemd import FILES
from thinwire.core import RunPlan
from thinwire.core.clock import down_since_of, last_beat
from thinwire.core.events import RunStatusChanged
from thinwire.core.fleet import TaskReport
from thinwire.core.statedir import AggregatorHome, living_holder
from thinwire.server.run_deletion import DAY_S
from thinwire.store import Store

PATIENCE_S = 60.0
COMMAND = [sys.executable, "-m", "thinwire.cli"]


def processes_that_name(text: str) -> set[int]:
    """The pids of all processes whose command line holds `text`, but ours."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.add(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found - {os.getpid()}


def until(true, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def old_run(home) -> str:
    """A run that ended years ago, and the setting that deletes runs by age; both are here before the aggregator."""
    (home / "aggregator").mkdir(parents=True)
    (home / "aggregator.toml").write_text("keep_days = 30\n")
    with Store.open(AggregatorHome.under(home).database) as store:
        plan = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 1')
        run_id = store.create_run("toy", plan, LAYOUT, TaskReport("toy"))
        store.record(run_id, [RunStatusChanged(time.time() - 1000 * DAY_S, "done", "")])
        store.record_believed(time.time())  # the last look at what is too old, so that the clock is not doubted
    return run_id


@pytest.fixture
def background(home):
    """An aggregator in the background with its page; ended by its own command."""
    api, page = free_port(), free_port()
    listen = ["--listen", f"127.0.0.1:{api}", "--dashboard", f"127.0.0.1:{page}", "--home", str(home)]
    start = [*COMMAND, "aggregator", "start", "--background", *listen]
    done = run_forked(start, PATIENCE_S, env=environment())
    assert done.returncode == 0, done.stderr
    yield done.stdout
    run_forked([*COMMAND, "aggregator", "stop", "--home", str(home)], PATIENCE_S, env=environment())
    until(lambda: not processes_that_name(str(home)), "it left processes behind")


def test_it_says_where_it_is_and_lets_whoever_started_it_look(thinwire, home, background):
    about = thinwire("aggregator", "status", "--json", "--home", home).document
    assert (about["devices"], about["running"], about["control_address"]) == (0, None, None)
    assert f"api      {about['listen']}" in background
    assert f"thinwire client start --aggregator http://{about['listen']} --task NAME=MODULE" in background
    assert "thinwire run PLAN" in background
    assert f"web      http://{about['dashboard']}\n" in background
    assert "code=" not in background + (home / "aggregator" / "service.log").read_text()  # they are kept
    login = thinwire("aggregator", "status", "--login", "--json", "--home", home).document["login"]
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(login) as answer:
        assert answer.status == 200
        assert "login" not in answer.url
    with pytest.raises(urllib.error.HTTPError, match="401"):  # a code works once
        urllib.request.urlopen(login)
    fresh = thinwire("aggregator", "status", "--login", "--json", "--home", home).document["login"]
    with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(fresh) as answer:
        assert "login" not in answer.url
    second = thinwire("aggregator", "start", "--home", home)
    assert (second.code, f"process {about['pid']}, its device API at {about['listen']}" in second.err) == (1, True)
    assert f"its page at {about['dashboard']}" in second.err
    taken = thinwire(
        "aggregator", "start", "--listen", about["listen"], "--no-dashboard", "--home", home.parent / "other"
    )
    assert (taken.code, "cannot listen" in taken.err) == (4, True)
    taken = thinwire("aggregator", "start", "--dashboard", about["dashboard"], "--home", home.parent / "third")
    assert (taken.code, "the port is taken" in taken.err) == (4, True)


def test_an_aggregator_deletes_runs_that_are_older_than_its_keep_days(thinwire, home, old_run, background):
    with Store.open(AggregatorHome.under(home).database, read_only=True) as store:
        until(lambda: store.deleted_run(old_run) is not None, "the run is still there")
    assert "deleted by keep_days" in thinwire("runs", "show", old_run, "--home", home).out


def test_it_may_open_files_for_many_devices_whatever_its_shell_allows(home):
    start = [*COMMAND, "aggregator", "start", "--no-dashboard", "--listen", f"127.0.0.1:{free_port()}", "--home", home]
    words = ["sh", "-c", 'ulimit -Sn 512; exec "$@"', "sh", *map(str, start)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()) as process:
        until(lambda: "listen" in (local_state.alive(home) or {}), "it does not serve")
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        process.terminate()
    assert soft == (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard))


@pytest.mark.parametrize(("terminal", "said"), [(True, "starting the aggregator ...\n"), (False, "")])
def test_a_start_says_at_a_terminal_that_it_has_begun(monkeypatch, capsys, terminal, said):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    serve.note_start()
    assert capsys.readouterr().err == said


def test_a_client_that_was_given_the_dashboard_s_address_says_so(thinwire, home, background):
    page = f"http://{thinwire('aggregator', 'status', '--json', '--home', home).document['dashboard']}"
    words = ["--aggregator", page, "--task", "digits=examples/digits/task.py", "--name", "pi-01", "--home", home]
    said = thinwire("client", "start", *words)
    assert said.code == 5
    assert f"error: the aggregator at {page} has its dashboard at this address, not its device API\n" in said.out
    assert (
        "try:   --aggregator with the address of its device API: there, thinwire aggregator status shows both\n"
        in said.out
    )


def dashboard_of(home: Path) -> dict[str, Any]:
    return living_holder(AggregatorHome(home / "aggregator").dashboard_lock) or {}


def test_a_dashboard_that_was_killed_is_started_again(thinwire, home, background):
    about = thinwire("aggregator", "status", "--json", "--home", home).document
    page = dashboard_of(home)["pid"]
    os.kill(page, signal.SIGKILL)
    assert thinwire("aggregator", "status", "--home", home).code == 0
    until(lambda: dashboard_of(home).get("pid") not in (None, page), "the dashboard did not come back")
    until(lambda: dashboard_of(home).get("dashboard") == about["dashboard"], "it listens elsewhere")


def test_a_dashboard_that_a_killed_aggregator_had_begun_is_adopted(home, monkeypatch):
    """It takes the lock behind the next aggregator's last look, and that one's own dashboard ends."""
    place, said = AggregatorHome.under(home), list[str]()
    Store.open(place.database).close()
    words = f"sqlite:///{place.database}", place, Address.parse(f"127.0.0.1:{free_port()}", ""), environment()
    made = [dashboard.Dashboard(*words, said.append) for _ in range(2)]
    with forking(dashboard), made[0] as first:
        looks = iter([None])
        monkeypatch.setattr(dashboard, "dashboard_of", lambda place: next(looks, local_state.dashboard_of(place)))
        with made[1] as second:
            assert second.url == first.url == first.address.url
            assert "error: cannot listen" in (place.root / dashboard.LOG).read_text(), "its own one ended"
    assert said == []


HOLDING = """
import json, sys, time
from pathlib import Path
from thinwire.core.statedir import hold
with hold(Path(sys.argv[1]), json.loads(sys.argv[2])):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ({}, True),
        ({"version": "0.0.1"}, False),
        ({"dashboard": "127.0.0.1:1"}, False),
        ({"options": ["other.example", "", ""]}, False),
        ({"standalone": True, "dashboard": "127.0.0.1:1"}, True),
        ({"standalone": True, "version": "0.0.1"}, False),
    ],
)
def test_a_dashboard_of_this_version_and_address_is_adopted_and_another_one_is_ended(home, changed, stays):
    place, at = AggregatorHome.under(home), Address.parse(f"127.0.0.1:{free_port()}", "")
    about = {"dashboard": str(at), "version": __version__, "options": dashboard.Reach().options(), **changed}
    words = [sys.executable, "-c", HOLDING, str(place.dashboard_lock), json.dumps(about)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        made = dashboard.Dashboard("sqlite://", place, at, environment(), print)
        assert (process.poll() is None) == stays
        assert str(made.address) == (about["dashboard"] if stays or "standalone" in changed else str(at))
        process.kill()


def test_the_dashboard_outlives_an_aggregator_that_was_killed_and_the_next_one_adopts_it(thinwire, home, background):
    about = thinwire("aggregator", "status", "--json", "--home", home).document
    page = dashboard_of(home)["pid"]
    os.kill(about["pid"], signal.SIGKILL)
    until(lambda: thinwire("aggregator", "status", "--home", home).code == 4, "the aggregator lives")
    login = thinwire("aggregator", "status", "--login", "--json", "--home", home).document["login"]
    with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(login) as answer:
        assert answer.status == 200  # runs stay readable
    listen = ["--listen", about["listen"], "--dashboard", about["dashboard"], "--home", str(home)]
    again = run_forked([*COMMAND, "aggregator", "start", "--background", *listen], PATIENCE_S, env=environment())
    assert again.returncode == 0, again.stderr
    assert dashboard_of(home)["pid"] == page
    said = thinwire("aggregator", "logs", "--home", home).out
    assert said.count(f"serves devices at {about['listen']}") == 2  # and `background` sees that stop ends both


def test_a_standalone_dashboard_replaces_the_aggregator_s_and_is_not_ended_with_it(thinwire, home, background):
    about = thinwire("aggregator", "status", "--json", "--home", home).document
    command = [*COMMAND, "aggregator", "dashboard", "--listen", about["dashboard"], "--home", str(home)]
    own = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    assert own.stdout is not None
    try:
        assert own.stdout.readline() == f"ready {about['dashboard']}\n"
        assert thinwire("aggregator", "status", "--json", "--home", home).document["dashboard"] == about["dashboard"]
        assert dashboard_of(home)["standalone"]
        other = thinwire("aggregator", "dashboard", "--listen", "127.0.0.1:0", "--home", home)
        assert (other.code, "a dashboard of this folder runs already" in other.err) == (1, True)
        assert thinwire("aggregator", "stop", "--home", home).code == 0
        assert dashboard_of(home)["standalone"]
    finally:
        own.terminate()
        own.wait(PATIENCE_S)
        own.stdout.close()


def test_ctrl_c_detaches_from_a_run_which_goes_on_until_it_is_stopped(thinwire, home, background):
    plan = Path(__file__).parents[2] / "examples" / "digits" / "plan.toml"
    following = Forked(
        [*COMMAND, "run", str(plan), "--home", str(home)], stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(),
    )  # fmt: skip
    assert following.stderr is not None
    for line in following.stderr:
        if "waiting: 0 of 1 device" in line:
            break
    following.send_signal(signal.SIGINT)
    assert following.wait(PATIENCE_S) == 130
    said = following.stderr.read()
    following.stderr.close()
    assert "thinwire runs stop digits-1" in said
    about = thinwire("aggregator", "status", "--json", "--home", home).document
    assert about["running"] == "digits-1"
    stopped = thinwire("runs", "stop", "latest", "--json", "--home", home)
    assert stopped.document == {"run_id": "digits-1", "status": "stopped", "was_over": False}
    assert thinwire("runs", "watch", "latest", "--home", home).code == 10


BEGINNING = """
import os, sys
from pathlib import Path
from thinwire.cli.local_state import starting
from thinwire.cli.main import main

class Killed:
    def find_spec(self, name, path=None, target=None):
        if name == "thinwire.flower":  # the first of the imports that take long
            os._exit(7 if starting(Path(sys.argv[-1])) == os.getpid() else 8)

sys.meta_path.insert(0, Killed())
main()
"""


def test_others_see_that_it_starts_before_its_imports_and_a_start_that_dies_there_leaves_the_last_beat(home: Path):
    lock = AggregatorHome.under(home).lock
    lock.write_text('{"pid": 4194305}')
    os.utime(lock, (1000.0, 1000.0))
    start = [sys.executable, "-c", BEGINNING, "aggregator", "start", "--home", str(home)]
    assert subprocess.run(start, env=environment(), timeout=PATIENCE_S, check=False).returncode == 7
    assert (last_beat(lock), down_since_of(lock)) == (1000.0, 1000.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_softly(home, number):
    command = [*COMMAND, "aggregator", "start", "--listen", "127.0.0.1:0", "--no-dashboard", "--home", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("run "):
            break
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 0, said
    process.stdout.close()


def test_a_client_says_what_it_is(thinwire, home):
    assert json.loads(thinwire("client", "status", "--json", "--home", home).out) == []
    words = ["--aggregator", f"127.0.0.1:{free_port()}", "--task", "digits=examples/digits/task.py", "--once"]
    said = thinwire("client", "start", *words, "--name", "pi-01", "--home", home)
    assert said.code == 4
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert (row["name"], row["running"]) == ("pi-01", False)
    assert (row["state"], row["pending"]) == ("stopped", 0)
    assert "cannot reach the aggregator" in row["last_error"]
    assert "cannot reach the aggregator" in thinwire("client", "status", "--home", home).out
    said = thinwire("client", "logs", "--name", "pi-01", "--home", home)
    assert next(line.partition(" ")[2] for line in said.out.splitlines()) == "connecting"
    assert "cannot reach the aggregator" in said.out
    assert str(home / "clients" / "pi-01") in said.err
    assert thinwire("client", "logs", "--name", "pi-01", "--last-error", "--home", home).code == 9
