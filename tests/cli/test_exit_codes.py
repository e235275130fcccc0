"""Every way to fail has its code, and says error, why and try on stderr."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys

import pytest

from tests.support.cli_story import told
from thinwire.core.statedir import AggregatorHome, hold

TWO_LINES = '[run]\ntask = "toy"\n[local]\nlr = 0.5\n'


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TWO_LINES)
    return path


def refused(said, code):
    assert said.code == code, said.err
    assert said.err.startswith("error: ")
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    "words",
    [
        ["runz"],
        ["run"],
        ["runs", "model", "latest"],
        ["aggregator", "start", "--listen", "nowhere"],
        ["client", "start", "--aggregator", "ftp://x", "--task", "a=b"],
        ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--name", "UPPER"],
        ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--partition", "3/3"],
        ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--split", "odd"],
        ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--python", "/nowhere/python"],
    ],
)
def test_a_command_that_cannot_be_understood_is_2(thinwire, words):
    assert "try:" in refused(thinwire(*words), 2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["runz"], "did you mean 'run', 'runs'? there are demo, init, run, "),
        (
            ["demo", "--keep"],
            "did you mean '--help', '--seed'? there are --clients, --rounds, --seed, --no-browser, --exit",
        ),
        (["zzz"], "there are demo, init, run, "),
        (["runs", "list", "--zzz"], "there are --tag, "),
        (["runs", "show", "a", "b"], "it reads: "),
        (["sim", "plan.toml", "--clients", "x"], "'x' is not a whole number\n"),
        (["runs", "list", "--home"], "its value is to stand behind it"),
        (["runs", "list", "--json=3"], "it is set by its name alone"),
        (["run"], "it is needed: "),
        (["runs", "model", "latest"], "it is needed: "),
        (["aggregator", "start", "--listen", "nowhere"], "an address of this machine and a port"),
        (["aggregator", "start", "--listen", "127.0.0.1:99999"], "a port is 1 to 65535"),
        (["aggregator", "start", "--dashboard", "127.0.0.1:-1"], "a port is 1 to 65535"),
        (["client", "start", "--aggregator", "ftp://x", "--task", "a=b"], "https://HOST:PORT is one"),
    ],
)
def test_what_the_options_do_not_allow_is_refused_with_why(thinwire, words, why):
    assert f"\nwhy:   {why}" in refused(thinwire(*words), 2)


@pytest.mark.parametrize(
    ("typed", "tried"),
    [
        ("2/2", "--partition 0/2 for the first or 1/2 for the last"),
        ("8/8", "--partition 0/8 for the first to 7/8 for the last"),
        ("1/1", "--partition 0/1, which is all of it, or none"),
        ("2", "--partition 0/3 for the first to 2/3 for the last"),
        ("1/0", "--partition 0/3 for the first to 2/3 for the last"),
        ("1/²", "--partition 0/3 for the first to 2/3 for the last"),
    ],
)
def test_a_part_that_cannot_be_is_answered_with_those_that_can(thinwire, typed, tried):
    start = ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--partition", typed]
    assert f"try:   {tried}\n" in refused(thinwire(*start), 2)


@pytest.mark.parametrize("given", [True, False])
def test_a_policy_with_a_key_that_nobody_knows_is_3_and_names_it(thinwire, tmp_path, given):
    folder = tmp_path / "state" / "clients" / "pi-01"
    folder.mkdir(parents=True)
    path = tmp_path / "mine.toml" if given else folder / "client.toml"
    path.write_text('[policy]\nhourz = "22:00-06:00"\n')
    words = ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--name", "pi-01"]
    more = ["--home", tmp_path / "state", *(["--policy", path] if given else [])]
    said = refused(thinwire(*words, *more), 3)
    assert f"{path}: unknown key [policy] hourz" in said
    assert "try:   [policy] hours" in said


def test_a_policy_that_was_named_and_is_not_there_is_3(thinwire, tmp_path):
    words = ["client", "start", "--aggregator", "http://127.0.0.1:1", "--task", "a=b", "--policy", tmp_path / "none"]
    assert "there is no policy" in refused(thinwire(*words), 3)


def test_a_set_without_a_value_is_2(thinwire, plan):
    assert "has no value" in refused(thinwire("plan", "check", plan, "--set", "local.lr"), 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TWO_LINES + "rate = 1\n", "unknown key [local] rate"),
        (TWO_LINES.replace("0.5", '"fast"'), "[local] lr = 'fast' is not valid"),
        (TWO_LINES + '[uplink]\ncodec = "topq(0.01)"\n', "no codec 'topq'"),
        (TWO_LINES + '[uplink]\ncodec = "topk(7)"\n', "topk"),
        (TWO_LINES + '[server]\nreduce = "median"\n', 'reduce = "median" with [cohort] late'),
        ("[run\n", "is not TOML"),
        ("", "is missing"),
    ],
)
def test_a_plan_that_cannot_be_is_3(thinwire, plan, home, text, said):
    plan.write_text(text)
    for words in (["plan", "check", plan], ["run", plan, "--home", home], ["sim", plan, "--clients", 2]):
        err = refused(thinwire(*words), 3)
        assert said in err
        assert "try:" in err


def test_a_plan_that_is_not_there_is_3(thinwire, tmp_path):
    assert "thinwire init" in refused(thinwire("run", tmp_path / "none.toml"), 3)


def test_a_plan_with_two_faults_names_both(thinwire, plan):
    plan.write_text(TWO_LINES + '[uplink]\ncodec = "topq"\n[server]\nreduce = "median"\n')
    err = refused(thinwire("plan", "check", plan), 3)
    assert "2 reasons" in err
    assert "topq" in err
    assert "[server] reduce" in err


def test_a_run_without_an_aggregator_is_4_and_says_how_to_start_one(thinwire, plan, home):
    assert "thinwire aggregator start" in refused(thinwire("run", plan, "--home", home), 4)


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_an_aggregator_that_is_not_there_is_4(thinwire, home, verb):
    refused(thinwire("aggregator", verb, "--home", home), 4)


def test_an_aggregator_that_died_is_not_taken_for_one_that_lives(thinwire, home):
    place = AggregatorHome.under(home)
    with hold(place.lock, {"listen": "127.0.0.1:9"}):
        pass
    refused(thinwire("aggregator", "status", "--home", home), 4)


def test_a_task_without_code_is_3(thinwire, plan, home):
    place = AggregatorHome.under(home)
    told(home)
    with hold(place.lock, {"listen": "127.0.0.1:9"}):
        assert "thinwire.tasks:toy" in refused(thinwire("run", plan, "--home", home), 3)
        assert "--task toy=x" in refused(thinwire("run", plan, "--task", "other=x", "--home", home), 3)


@pytest.mark.parametrize(
    ("key", "code"),
    [("reduce", "from thinwire.aggregation.reductions import Median as Mine"),
     ("optimizer", "from thinwire.aggregation.server_optimizers import FedAvg as Mine")],
)  # fmt: skip
def test_code_in_a_file_with_a_relative_path_is_3_where_an_aggregator_would_look_elsewhere(
    thinwire, plan, home, tmp_path, monkeypatch, key, code
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"my_{key}.py").write_text(code)
    told(home)
    with hold(AggregatorHome.under(home).lock, {"listen": "127.0.0.1:9"}):
        words = ["run", plan, "--set", f"server.{key}='my_{key}.py:Mine'", "--set", "cohort.late='drop'"]
        said = refused(thinwire(*words, "--home", home), 3)
    assert f'[server] {key} = "{tmp_path}/my_{key}.py:Mine"' in said


def test_two_aggregators_on_one_folder_are_refused(thinwire, home):
    place = AggregatorHome.under(home)
    with hold(place.lock, {"listen": "127.0.0.1:9"}):
        for more in ((), ("--background",)):
            said = refused(thinwire("aggregator", "start", *more, "--home", home), 1)
            assert f"process {os.getpid()}, its device API at 127.0.0.1:9\n" in said
            assert "why:   two in " in said
            assert f"thinwire aggregator stop --home {home}" in said


def test_a_store_of_a_newer_version_is_8(thinwire, home):
    told(home)
    with sqlite3.connect(AggregatorHome.under(home).database) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    refused(thinwire("runs", "list", "--home", home), 8)
    refused(thinwire("aggregator", "start", "--no-dashboard", "--listen", "127.0.0.1:0", "--home", home), 8)


def test_a_file_that_is_no_store_is_8(thinwire, home):
    AggregatorHome.under(home).database.write_bytes(b"not a database" * 100)
    refused(thinwire("runs", "list", "--home", home), 8)


@pytest.mark.parametrize("left", ["empty", "not there"])
@pytest.mark.parametrize("beside", ["runs/toy-1/v0.model", "spool/toy-1.pi-01.1"])
def test_a_store_that_was_lost_beside_what_it_knew_is_8(thinwire, home, left, beside):
    place = AggregatorHome.under(home)
    (place.root / beside).parent.mkdir(parents=True)
    (place.root / beside).touch()
    if left == "empty":
        place.database.touch()
    commands = [
        ("aggregator", "start", "--no-dashboard", "--listen", "127.0.0.1:0"), ("aggregator", "backup",
            home / "backup.tar"),
        ("runs", "list"), ("runs", "show"), ("devices", "list"),
    ]  # fmt: skip
    for words in commands:
        said = refused(thinwire(*words, "--home", home), 8)
        assert f"the database {place.database} is {left}" in said
        assert "thinwire aggregator restore" in said
    assert not place.database.exists() or place.database.stat().st_size == 0
    doctor = thinwire("aggregator", "doctor", "--json", "--home", home).document
    assert "aggregator restore" in next(row["try"] for row in doctor["findings"] if row["what"] == "store")


@pytest.mark.parametrize("words", [["runs", "show", "nope"], ["runs", "watch", "nope"], ["runs", "stop", "nope"]])
def test_a_run_that_is_not_there_is_9(thinwire, home, words):
    told(home)
    assert "toy-1" in refused(thinwire(*words, "--home", home), 9)


def test_before_the_first_run_there_is_no_such_thing_either(thinwire, home):
    assert "thinwire aggregator start" in refused(thinwire("runs", "show", "--home", home), 9)
    assert "thinwire aggregator start" in refused(thinwire("runs", "stop", "x", "--home", home), 9)
    assert not (home / "aggregator" / "store.sqlite3").exists()
    for command in ("logs", "privacy"):
        said = thinwire("client", command, "--name", "pi", "--home", home)
        refused(said, 9)
        assert "no client 'pi' here" in said.err
    refused(thinwire("plan", "keys", "clocks"), 9)


def test_a_command_that_only_reads_makes_no_state_directory(thinwire, home):
    group = ("runs", "compare", "--group", "g")
    aggregator = [("aggregator", verb) for verb in ("config", "logs")]
    others = (("runs", "list"), ("runs", "show"), ("devices", "list"), ("devices", "invite"), ("privacy", "ledger"))
    for command in (*aggregator, *others, group):
        assert f"there is no folder {home}" in refused(thinwire(*command, "--home", home), 9)
        assert not home.exists()
    refused(thinwire("aggregator", "status", "--home", home), 4)
    assert not home.exists()


def test_a_folder_that_is_not_writable_is_8(thinwire, tmp_path):
    (tmp_path / "file").write_text("")
    refused(thinwire("runs", "list", "--home", tmp_path / "file"), 8)


def test_ctrl_c_while_following_is_130_and_leaves_the_run(home):
    told(home, "running")
    command = [sys.executable, "-m", "thinwire.cli", "runs", "watch", "--home", str(home)]
    watching = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_with_ctrl_c)
    assert watching.stderr is not None
    assert "round" in watching.stderr.readline()
    watching.send_signal(2)
    assert watching.wait(60) == 130
    watching.stderr.close()


def _with_ctrl_c():
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_help_imports_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "thinwire.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Federated learning" in done.stdout
    heavy = {"torch", "flwr", "sqlalchemy", "numpy", "fastapi"}
    assert {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & heavy == set()


@pytest.mark.parametrize(
    ("words", "needed"),
    [(("runs", "list", "--json"), {"sqlalchemy", "thinwire.store"}), (("client", "status"), set[str]())],
)
def test_commands_that_only_look_import_nothing_heavy(home, words, needed):
    told(home)
    command = [sys.executable, "-X", "importtime", "-m", "thinwire.cli", *words, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    heavy = {
        "torch", "flwr", "numpy", "pydantic", "alembic", "fastapi", "cryptography", "rich", "sqlalchemy",
        "sqlalchemy.dialects.postgresql", "thinwire.core.plan", "thinwire.store", "thinwire.server",
    }  # fmt: skip
    assert {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & heavy == needed


def test_a_reader_that_has_seen_enough_is_no_error(home):
    told(home)
    command = f"{sys.executable} -m thinwire.cli runs show --json --home {home} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistyped_command_is_answered_once_with_the_nearest(thinwire):
    said = thinwire("runs", "sho")
    assert said.code == 2
    what, why, hint = said.err.splitlines()
    assert what == "error: No such command 'sho'."
    assert why.startswith("why:   did you mean 'show'? there are compare, ")
    assert hint.endswith("runs --help")
    assert thinwire("runs", "submit", "plan.toml").err.endswith("\ntry:   thinwire run PLAN\n")


def test_a_plan_that_is_not_there_is_said_in_words(thinwire, tmp_path):
    said = thinwire("run", str(tmp_path / "nosuch.toml"))
    assert said.code == 3
    assert "why:   a plan is a TOML file, and there is no such file\n" in said.err


def test_a_command_to_type_names_the_home_that_was_typed(thinwire, home, store):
    for words in (("--home", home), (f"--home={home}",)):
        assert f"try:   thinwire devices list --home {home}" in thinwire("devices", "show", "x", *words).err
        assert f"try:   thinwire client start --home {home}" in thinwire("client", "logs", "--name", "x", *words).err
    assert "try:   thinwire client start" in thinwire("client", "logs", "--name", "x").err.splitlines()
