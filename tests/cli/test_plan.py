"""`thinwire plan`: write a plan, check it, explain it, and show in which keys two plans differ."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from thinwire.cli.task import load
from thinwire.client.task import initial_model
from thinwire.core import RunPlan
from thinwire.core.events import DeviceOnline, RunStatusChanged
from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.run_events import PhaseClosed
from thinwire.core.statedir import AggregatorHome
from thinwire.store import MeasureRow, Store


def test_a_plan_that_was_written_is_valid_and_is_not_overwritten(thinwire, tmp_path):
    file = tmp_path / "plan.toml"
    assert thinwire("plan", "new", file, "--task", "digits", "--lr", "0.5").code == 0
    assert file.read_text() == '[run]\ntask = "digits"\n\n[local]\nlr = 0.5\n'
    assert thinwire("plan", "check", file).code == 0
    again = thinwire("plan", "new", file)
    assert (again.code, f"{file} exists" in again.err) == (2, True)
    assert thinwire("plan", "new").out == '[run]\ntask = "mine"\n\n[local]\nlr = 0.1\n'


def test_two_plans_are_compared_by_their_keys_also_where_one_names_a_default(thinwire, tmp_path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('[run]\ntask = "digits"\n[local]\nlr = 0.5\n')
    other.write_text('[run]\ntask = "digits"\nrounds = 7\n[local]\nlr = 0.5\nmomentum = 0.0\n')
    assert thinwire("plan", "diff", one, other, "--json").document == {"[run] rounds": [20, 7]}
    said = thinwire("plan", "diff", one, other).out
    assert "[run] rounds" in said
    assert said.split("\n")[0].split() == ["KEY", str(one), str(other)], "names of files, which have no capitals"
    assert "the plans are equal" in thinwire("plan", "diff", one, one).err


@pytest.mark.parametrize("words", [("plan", "new", "file/plan.toml"), ("init", "file")])
def test_a_file_in_place_of_a_folder_is_refused_without_an_option_that_the_command_lacks(
    thinwire, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    said = thinwire(*words)
    assert (said.code, "why:   file is a file, and no folder\n" in said.err) == (2, True)
    assert "--home" not in said.err


def test_a_run_in_place_of_a_plan_is_told_where_its_plan_is(thinwire):
    said = thinwire("plan", "explain", "digits-1")
    assert said.code == 3
    assert said.err.splitlines() == [
        "error: cannot read the plan digits-1",
        "why:   a plan is a TOML file, and there is no such file",
        "try:   thinwire init DIR writes one; the plan of a run: thinwire runs show ID --json",
    ]


def test_a_folder_in_place_of_a_plan_is_answered_with_its_plan(thinwire, tmp_path):
    assert f"try:   {tmp_path / 'plan.toml'}\n" in thinwire("plan", "check", tmp_path).err


@pytest.mark.parametrize("wrong", ['[uplink]\ncodec = "int9 > rise"', "steps = 5\nepochs = 2"])
def test_a_plan_that_cannot_run_is_not_explained_but_refused_as_by_the_check(thinwire, tmp_path, wrong):
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[run]\ntask = "digits"\n[local]\nlr = 0.1\n{wrong}\n')
    checked, explained = thinwire("plan", "check", plan), thinwire("plan", "explain", plan)
    assert (explained.code, explained.err, explained.out) == (3, checked.err, "")


EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "secure.toml"


def test_the_announced_bytes_of_a_secure_round_are_those_that_a_simulated_one_counts(thinwire, tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    sets = ["--set", "run.rounds=2", "--set", "secure.support=0.5"]
    told = thinwire("plan", "explain", EXAMPLE, *sets, "--clients", "6", "--json").document["secure_round"]
    run_id = thinwire("sim", EXAMPLE, *sets, "--clients", "6", "--split", "iid").out.split()[-1]
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        events = [event for _, event in store.events(run_id)]
    closed = [event for event in events if isinstance(event, PhaseClosed) and event.round == 2]
    counted = {event.phase: mean(event.received.values()) for event in closed}  # t answers to `unmask` are enough
    assert counted == {phase: pytest.approx(both["up"], rel=0.02) for phase, both in told["phases"].items()}
    assert told["up_bytes"] == pytest.approx(sum(counted.values()), rel=0.02)
    assert told["dense_bytes"] == 9610 * 4
    assert told["uplink_ratio"] == told["dense_bytes"] / told["up_bytes"]
    assert told["upload_s_at_mbit"]["1"] == told["up_bytes"] * 8 / 1e6


def test_the_explanation_of_a_secure_plan_names_phases_numbers_and_protection(thinwire):
    said = thinwire("plan", "explain", EXAMPLE, "--clients", "8")
    assert "a secure round of 8 clients, 9610 parameters" in said.out
    assert all(phase in said.out for phase in ("advertise", "share", "masked", "agree", "unmask"))
    assert "n = 8 clients, A = 2 may be corrupt and D = 2 may leave; t = 5 reveal a secret" in said.out
    assert (
        "protects the updates of one round against an honest-but-curious aggregator with up to 2 of 8 clients colluding"
        in said.out
    )
    assert "warning" not in said.err
    (codec,) = (line for line in said.out.splitlines() if line.startswith("[uplink] codec "))
    assert codec.split()[2:6] == ["(lattice)", "-", "not", "used"], "its default is for updates without masks"
    assert "secure round" not in thinwire("plan", "explain", EXAMPLE.with_name("plan.toml")).out


def test_the_seconds_of_a_secure_round_are_those_of_the_devices_at_hand(thinwire, home, store):
    layout = initial_model(load("digits", EXAMPLE, None), 1).layout
    report = TaskReport("digits", layout_digest=layout.digest, tensors=layout.text)
    key, rates = f"{layout.digest[:16]}/32", {"pi-fast": 1e6, "pi-slow": 1e5, "pi-thin": 1e4}  # bytes a second
    for name in rates:
        store.roster.enrol(name, name.encode().hex().ljust(64, "0"), name.encode(), "loopback")
        store.roster.seen(Hello(name, "p1", (report,)), 1.0)
        store.record_device(DeviceOnline(1.0, name))
    explain = ("plan", "explain", EXAMPLE, "--clients", "8", "--home", home)
    said = thinwire("plan", "explain", EXAMPLE, "--home", home).out
    assert "a secure round of 3 clients" in said, "without --clients it is one of the devices at hand"
    assert (
        "devices     their times are not known: never measured with this model: pi-fast, pi-slow, pi-thin; no run"
        in (said)
    )
    assert "one plain run with this model does" in said
    four = thinwire("plan", "explain", EXAMPLE, "--home", home, "--set", "cohort.clients=4").out
    assert "a secure round of 4 clients" in four, "three devices are too few for the plan, so it is explained without"
    run_id = store.create_run("digits", RunPlan.load(EXAMPLE), layout, report)
    rows = [
        MeasureRow(name, kind, work, [[amount, 1.0], [10 * amount, 10.0]], None, None, 1.0)
        for name, rate in rates.items()
        for kind, work, amount in (("up", "", rate), ("down", "", rate), ("step", key, 10.0))
    ]
    store.record(run_id, [RunStatusChanged(2.0, "done", "")], rows)
    found = thinwire(*explain, "--json").document["secure_round"]
    thin = next(row for row in found["devices"]["devices"] if row["device"] == "pi-thin")
    assert thin["up_s"] == pytest.approx(found["devices"]["up_bytes"] / 1e4, rel=0.1)
    assert found["devices"]["round_s"] == pytest.approx(thin["down_s"] + thin["train_s"] + thin["up_s"])
    said = thinwire(*explain).out
    assert "(pi-fast) to" in said
    assert "3 of 3 devices measured" in said


def test_rare_visits_and_coarse_rounding_are_warned_about(thinwire):
    sets = ["--set", "secure.support=0.1", "--set", "secure.rotate=false", "--set", "secure.bits=2"]
    said = thinwire("plan", "explain", EXAMPLE, *sets, "--clients", "8").err
    assert "each coordinate is sent 2 times in 20 rounds, fewer than 10: [run] rounds = 100" in said
    assert "times the squared norm of an update: [secure] rotate = true, or more bits" in said
    assert "each coordinate is sent 2 times" in thinwire("plan", "check", EXAMPLE, *sets).err


def test_a_check_says_who_is_protected_where_the_number_of_clients_is_known(thinwire):
    assert "8 bits a value under masks" in thinwire("plan", "check", EXAMPLE).out
    unknown = thinwire("plan", "check", EXAMPLE)
    assert "colluding" not in unknown.out, "the devices online decide, and none is here"
    assert "it needs 3 devices or more; whom it protects depends on their number: thinwire plan check" in unknown.err
    assert "the run begins as soon as 3 devices are connected; [cohort] wait_for = N waits for more" in unknown.err
    assert "depends" not in thinwire("plan", "check", EXAMPLE, "--clients", "8").err
    counted = thinwire("plan", "check", EXAMPLE, "--set", "cohort.clients=20", "--set", "cohort.over_select=0.2")
    assert "up to 6 of 24 clients colluding" in counted.out
    assert thinwire("plan", "check", EXAMPLE, "--clients", "8", "--json").document["secure_round"]["threshold"] == 5


def test_a_cohort_that_is_too_small_is_refused(thinwire):
    for words in (["--clients", "2"], ["--set", "cohort.clients=2"]):
        said = thinwire("plan", "check", EXAMPLE, *words)
        assert said.code == 3
        assert "secure aggregation of 2 clients" in said.err
        assert "3 devices or more, and no [cohort] clients below 3" in said.err


def test_a_task_is_checked_with_the_bytes_of_its_secure_plan(thinwire):
    found = thinwire("task", "check", EXAMPLE.with_name("task.py"), "--plan", EXAMPLE, "--json").document
    assert found["codec"] == "8 bits a value under masks (10 clients)"
    told = thinwire("plan", "explain", EXAMPLE, "--json").document["secure_round"]
    assert (found["up_bytes"], told["selected"]) == (told["up_bytes"], 10)


@pytest.mark.parametrize("words", [("plan", "check"), ("run",), ("sim",), ("sim", "--seeds", "2")])
def test_all_conflicts_of_a_plan_are_reported_at_once(thinwire, home, words):
    sets = ["--set", "cohort.late=aggregate", "--set", "local.steps=auto", "--set", "privacy.clip=1.0"]
    said = thinwire(*words, EXAMPLE, *sets)
    assert said.code == 3
    for what in ('[cohort] late = "aggregate"', '[local] steps = "auto"', "[privacy] clip = 1.0"):
        assert what in said.err.partition("try:")[0]
    assert "cannot run for 3 reasons" in said.err
