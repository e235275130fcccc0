"""`thinwire privacy ledger`, `settle` and `client privacy`: what was spent by whom on what, and what is not known."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.store.test_privacy_ledger import enrol, release_it, reserve
from tests.support.cli_story import told
from tests.support.store_story import DEVICES, new_run, status
from thinwire.cli.privacy_ledger import OWN_ASSUMPTIONS, OWN_DELTA, OWN_TRUST
from thinwire.client.booking import Booking
from thinwire.client.privacy_ledger import DeviceLedger
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.fleet import Hello, population_key
from thinwire.core.formatting import rounded_up
from thinwire.core.statedir import client_home
from thinwire.privacy.accounting import Release, epsilon
from thinwire.privacy.meaning import UNITS, meaning
from thinwire.server.model_files import require_counted, require_counted_file
from thinwire.store import Store

CHEAP = Release("discrete-gaussian", sensitivity=10.0, variance=900.0, dimensions=64)
DEAR = Release("skellam", sensitivity=10.0, variance=100.0, dimensions=64, parties=8)


@pytest.fixture
def spent(store: Store) -> str:
    """Two rounds in the ward, of which one was released, and one in the clinic."""
    enrol(store, *DEVICES)
    run_id = new_run(store)
    reserve(store, run_id, 1, release=CHEAP.to_json(), devices=DEVICES[:2])
    release_it(store, run_id, 1)
    reserve(store, run_id, 2, release=CHEAP.to_json(), devices=DEVICES[1:])
    reserve(store, run_id, 3, population="clinic", release=DEAR.to_json(), devices=DEVICES[:1])
    return run_id


def test_the_ledger_is_a_table_by_population_and_run_with_what_it_cost(thinwire, home, spent):
    said = thinwire("privacy", "ledger", "--home", home)
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["POPULATION", "RUN", "ROUNDS", "RELEASED", "NOISE", "DEVICES", "EPSILON", "DELTA"]
    both, one = epsilon({CHEAP: 2}, 1e-5), epsilon({DEAR: 1}, 1e-5)
    assert lines[1] == ["clinic", spent, "1", "0", "skellam", "1", rounded_up(one), "1e-05"]
    assert lines[2] == ["ward", spent, "2", "1", "discrete-gaussian", "3", rounded_up(both), "1e-05"]
    told = (
        f"ward: 2 releases, epsilon {rounded_up(both)} at delta 1e-05, for a device that was selected for all of them"
    )
    assert told in said.out
    assert (said.code, said.err) == (0, "")


def test_the_ledger_of_one_device_or_population_has_no_other(thinwire, home, spent):
    said = thinwire("privacy", "ledger", "--device", "pi-01", "--population", "ward", "--home", home)
    one = epsilon({CHEAP: 1}, 1e-5)
    assert f"ward: 1 release, epsilon {rounded_up(one)} at delta 1e-05, for pi-01" in said.out
    assert "clinic" not in said.out
    said = thinwire("privacy", "ledger", "--device", "nobody", "--home", home)
    assert (said.out, said.err) == ("", "nobody was selected for no private round\n")


def test_the_ledger_as_json_has_every_entry(thinwire, home, spent):
    found = thinwire("privacy", "ledger", "--json", "--home", home).document
    assert found["populations"]["ward"] == {
        "releases": 2, "epsilon": epsilon({CHEAP: 2}, 1e-5), "delta": 1e-5, "distributions": ["discrete-gaussian"],
        "unit": "client",
    }  # fmt: skip
    assert found["blocked"] == {}
    assert [(one["state"], one["round"], one["devices"]) for one in found["entries"]] == [
        ("committed", 1, ["pi-01", "pi-02"]), ("reserved", 2, ["pi-02", "pi-03"]), ("reserved", 3, ["pi-01"]),
    ]  # fmt: skip
    assert found["entries"][0]["release"] == json.loads(CHEAP.to_json())


def test_an_empty_ledger_says_so(thinwire, home, store):
    said = thinwire("privacy", "ledger", "--home", home)
    assert (said.code, said.out, said.err) == (0, "", "no private round has begun\n")


def test_a_release_that_is_not_readable_is_listed_without_an_epsilon(thinwire, home, store, spent):
    reserve(store, spent, 4, release='{"of": "a newer version"}')
    said = thinwire("privacy", "ledger", "--population", "ward", "--home", home)
    assert "ward: 3 releases, no bound on epsilon at delta 1e-05" in said.out
    assert thinwire("privacy", "ledger", "--json", "--home", home).document["populations"]["ward"]["epsilon"] is None


def test_a_restored_ledger_is_blocked_until_it_is_settled_as_the_costliest_release(
    thinwire, home, tmp_path, store, spent
):
    store.record(spent, [status("done")])
    assert thinwire("aggregator", "backup", tmp_path / "b.tar", "--home", home).code == 0
    said = thinwire("aggregator", "restore", tmp_path / "b.tar", "--force", "--home", home)
    settle = f"thinwire privacy ledger settle --home {home}"
    assert "private rounds wait until a person has settled what was spent since: thinwire privacy ledger" in said.err
    said = thinwire("privacy", "ledger", "--home", home)
    assert said.err.count("private rounds are blocked, because the ledger was restored from a backup of 20") == 3
    assert settle in said.err
    said = thinwire("privacy", "ledger", "settle", "ward", "--rounds", 5, "--home", home)
    assert (said.code, said.out) == (
        0, "ward is settled: 5 releases are charged to every device; private rounds may begin\n",
    )  # fmt: skip
    said = thinwire("privacy", "ledger", "settle", "new one", "--rounds", 2, "--json", "--home", home)
    assert said.document == {"population": "new one", "rounds": 2, "release": DEAR.to_json(), "device": ""}
    found = thinwire("privacy", "ledger", "--json", "--home", home).document
    assert set(found["blocked"]) == {"", "clinic"}
    assert found["populations"]["ward"]["epsilon"] == epsilon({CHEAP: 7}, 1e-5)
    said = thinwire("privacy", "ledger", "--device", "pi-01", "--population", "ward", "--home", home)
    assert f"ward: 6 releases, epsilon {rounded_up(epsilon({CHEAP: 6}, 1e-5))}" in said.out
    assert "settled by" in said.out
    said = thinwire("privacy", "ledger", "settle", "ward", "--rounds", 5, "--home", home)
    assert (said.code, "nothing is to be settled" in said.err) == (2, True)


def test_what_cannot_be_priced_or_is_too_little_is_not_settled(thinwire, home, tmp_path, store):
    enrol(store, "pi-01")
    thinwire("aggregator", "backup", tmp_path / "b.tar", "--home", home)
    thinwire("aggregator", "restore", tmp_path / "b.tar", "--force", "--home", home)
    said = thinwire("privacy", "ledger", "settle", "ward", "--rounds", 5, "--home", home)
    assert (said.code, "it is not known what one costs" in said.err) == (2, True)
    settle = ("privacy", "ledger", "settle", "ward", "--home", home)
    said = thinwire(*settle, "--rounds", 5, "--release", '{"of": "a newer version"}')
    assert (said.code, "is not readable" in said.err) == (8, True)
    said = thinwire(*settle, "--rounds", 5, "--release", json.dumps(json.loads(DEAR.to_json()), indent=1), "--json")
    assert said.document == {"population": "ward", "rounds": 5, "release": DEAR.to_json(), "device": ""}


def test_a_release_that_is_given_replaces_no_costlier_one(thinwire, home, tmp_path, store, spent):
    store.record(spent, [status("done")])
    thinwire("aggregator", "backup", tmp_path / "b.tar", "--home", home)
    thinwire("aggregator", "restore", tmp_path / "b.tar", "--force", "--home", home)
    for population, given, charged in (("ward", DEAR, DEAR), ("clinic", CHEAP, DEAR)):
        words = ("--rounds", 1, "--release", given.to_json(), "--json", "--home", home)
        said = thinwire("privacy", "ledger", "settle", population, *words)
        assert said.document["release"] == charged.to_json()


def test_a_population_that_had_no_private_round_is_settled_with_nothing(thinwire, home, tmp_path, store):
    thinwire("aggregator", "backup", tmp_path / "b.tar", "--home", home)
    thinwire("aggregator", "restore", tmp_path / "b.tar", "--force", "--home", home)
    assert thinwire("privacy", "ledger", "settle", "ward", "--rounds", 0, "--home", home).code == 0


def booked(folder: Path, number: int, data: str = "/data/ward", name: str = "") -> None:
    DeviceLedger(folder).book(
        Booking(1.0, name, data, "ward", CHEAP.to_json(), "ecg-1", "beef", number, f"ecg-1.{number}.pi", number)
    )


def test_a_device_shows_its_own_ledger(thinwire, home):
    folder = client_home(home, "pi-01")
    (folder / "client.toml").write_text("")
    said = thinwire("client", "privacy", "--name", "pi-01", "--home", home)
    assert (said.code, said.out, said.err) == (0, "", "pi-01 has taken part in no private round\n")
    for number, data, name in ((1, "/data/ward", ""), (2, "/data/ward", ""), (3, "/data/x", "x")):
        booked(folder, number, data, name)
    (folder / "client.toml").write_text("[policy]\nmax_delta = 1e-6\n")
    said = thinwire("client", "privacy", "--name", "pi-01", "--home", home)
    two = rounded_up(epsilon({CHEAP: 2}, 1e-6))
    assert ["/data/ward", "ward", "ecg-1", "2", "discrete-gaussian", two, "1e-06"] in [
        line.split() for line in said.out.splitlines()
    ]
    assert f"/data/ward: 2 releases, epsilon {two} at delta 1e-06, in all populations and runs together" in said.out
    for line in (
        f"unit     {UNITS['client']}",
        f"meaning  {meaning(epsilon({CHEAP: 2}, 1e-6), 1e-6)}",
        f"delta    {OWN_DELTA}",
        *(f"assumes  {one}" for one in OWN_ASSUMPTIONS),
        *(f"trusted  {one}" for one in OWN_TRUST),
    ):
        assert line in said.out.splitlines()
    assert "central" in OWN_TRUST[0]
    assert "claim" in OWN_TRUST[0]
    found = thinwire("client", "privacy", "--name", "pi-01", "--json", "--home", home).document
    assert found["trust"] == list(OWN_TRUST)
    assert found["datasets"][0]["meaning"] in said.out
    assert [one["releases"] for one in found["datasets"]] == [2, 1]
    assert len(found["entries"]) == 3
    assert found["head"] == DeviceLedger(folder).head
    assert population_key("ward") not in json.dumps(found)


def test_the_owner_of_protected_records_is_told_of_records(thinwire, home):
    folder = client_home(home, "pi-01")
    record = Release("discrete-gaussian", 10.0, 900.0, 64, rate=0.1, steps=5, unit="record").to_json()
    DeviceLedger(folder).book(Booking(1.0, "", "/data/ward", "ward", record, "ecg-1", "beef", 1, "ecg-1.1.pi", 1))
    said = thinwire("client", "privacy", "--name", "pi-01", "--home", home).out
    assert f"unit     {UNITS['record']}" in said
    assert "the data of one record of a device were used" in said


def test_a_damaged_ledger_of_a_device_is_shown_as_that(thinwire, home):
    folder = client_home(home, "pi-01")
    booked(folder, 1)
    path = folder / "privacy.jsonl"
    path.write_bytes(path.read_bytes().replace(b"ward", b"word"))
    said = thinwire("client", "privacy", "--name", "pi-01", "--home", home)
    assert said.err.startswith(f"pi-01 takes part in nothing private: line 1 of {path} is damaged")
    assert thinwire("client", "privacy", "--name", "none", "--home", home).code == 9


@pytest.mark.parametrize(
    ("source", "privacy", "said"),
    [
        ("devices", {"mode": "off"}, "without a bound"),
        ("devices", {"mode": "central", "population": "other"}, "counted in the population other, and not in ward"),
        ("devices", {"mode": "central", "population": "ward"}, ""),
        ("devices", {"mode": "example", "population": "ward"}, "hides one record"),
        ("sim", {"mode": "off"}, ""),  # the data of a simulation are the operator's own
    ],
)
def test_a_private_run_begins_with_no_model_whose_cost_is_not_counted(source, privacy, said):
    private = '[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\npopulation = "ward"\n'
    plan = '[run]\ntask = "ecg"\n[local]\nlr = 0.1\n'
    begun = {"run": {"init": ""}, "privacy": privacy}
    other: Any = SimpleNamespace(run_id="ecg-1", source=source, task="ecg", plan=begun)
    require_counted(RunPlan.parse(plan), other, "last", no_run)
    require_counted(RunPlan.parse(plan + private), other, "0", no_run)
    if not said:
        require_counted(RunPlan.parse(plan + private), other, "last", no_run)
        return
    for which, init in (("last", ""), ("1", ""), ("0", "device"), ("0", "run:ecg-0"), ("0", "model.safetensors")):
        other.plan["run"]["init"] = init
        with pytest.raises(PlanError, match=said):
            require_counted(RunPlan.parse(plan + private), other, which, no_run)


def no_run(run_id: str) -> Any:
    raise AssertionError(f"{run_id} is not looked at")


def test_a_simulated_model_counts_as_the_model_with_which_its_simulation_began(tmp_path):
    """A simulation of one's own data may go on from a model of devices, and does not make it free."""
    private = '[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\npopulation = "ward"\n'
    plan = RunPlan.parse(f'[run]\ntask = "ecg"\n[local]\nlr = 0.1\n{private}')
    runs: dict[str, Any] = {}

    def add(run_id: str, source: str, init: str = "", **privacy: str) -> Any:
        begun = {"run": {"init": init}, "privacy": {"mode": "off"} | privacy}
        runs[run_id] = SimpleNamespace(run_id=run_id, source=source, task="ecg", plan=begun)
        return runs[run_id]

    add("ecg-1", "devices")
    add("ecg-2", "sim", "run:ecg-1")
    add("ecg-3", "devices", mode="central", population="ward")
    for origin in ("run:ecg-1", "run:ecg-2", "run:ecg-2@0"):
        with pytest.raises(PlanError, match=f"the model of ecg-9, which began with {origin}.*without a bound"):
            require_counted(plan, add("ecg-9", "sim", origin), "last", runs.__getitem__)
    for origin in ("run:ecg-1@0", "run:ecg-3", ""):
        require_counted(plan, add("ecg-9", "sim", origin), "last", runs.__getitem__)
    file = tmp_path / "model.safetensors"
    other = add("ecg-9", "sim", str(file))
    with pytest.raises(PlanError, match="that file is not there, so nobody knows of which data"):
        require_counted(plan, other, "last", no_run)
    tensors = {"weight": np.zeros(1, np.float32)}
    save_file(tensors, file, {"run": "ecg-1"})
    with pytest.raises(PlanError, match="a file of the model of ecg-1.*without a bound"):
        require_counted(plan, other, "last", no_run)
    save_file(tensors, file)
    require_counted(plan, other, "last", no_run)


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ("", "without a bound"),
        ('[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\n', ""),
        (
            '[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\npopulation = "other"\n',
            "counted in the population other, and not in toy",
        ),
    ],
)
def test_the_file_of_a_model_says_what_its_run_has_spent(thinwire, home, tmp_path, privacy, said):
    plan = '[run]\ntask = "toy"\nrounds = 2\nevaluate = "off"\n[cohort]\ndeadline_s = 60\nlate = "drop"\n'
    plan += '[local]\nlr = 0.5\nsteps = 5\nbuffers = "local"\n'
    private = RunPlan.parse(f'{plan}[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\n')
    told(home, plan=plan + privacy)
    out = tmp_path / "model.safetensors"
    thinwire("runs", "model", "toy-1", "--out", out, "--home", home)
    require_counted_file(RunPlan.parse(plan), out)
    with pytest.raises(PlanError, match=f"a file of the model of toy-1.*{said}") if said else contextlib.nullcontext():
        require_counted_file(private, out)
    tensors = load_file(out)
    save_file(tensors, out, {"run": "toy-1"})  # as a client writes its whole model, or another version did
    with pytest.raises(PlanError, match="without a bound"):
        require_counted_file(private, out)
    save_file(tensors, out, {"run": "toy-1", "source": "sim"})
    require_counted_file(private, out)
    save_file(tensors, out, {"run": "toy-1", "source": "sim", "init": "run:toy-0"})
    with pytest.raises(PlanError, match="which began with run:toy-0.*does not say of which data"):
        require_counted_file(private, out)
    save_file(tensors, out)
    require_counted_file(private, out)


def test_a_device_that_brought_its_ledger_is_named_with_the_command_that_charges_it(thinwire, home, store, spent):
    enrol(store, "pi-09")
    booked = {population_key("ward"): 3}
    store.roster.seen(Hello("pi-09", "p1", booked=booked, booked_keys=("ab" * 32,)), at=1.0)
    said = thinwire("privacy", "ledger", "--home", home)
    assert "pi-09 takes part in no private round: it has 3 releases of ward in its own ledger" in said.err
    assert f"thinwire privacy ledger settle --home {home} ward --device pi-09 --rounds 3" in said.err
    assert "pi-09" in thinwire("privacy", "ledger", "--json", "--home", home).document["excluded"]["ward"]
    said = thinwire("privacy", "ledger", "settle", "ward", "--device", "pi-09", "--rounds", 3, "--home", home)
    assert (said.code, said.out) == (
        0, "pi-09 is charged 3 releases of ward; it may take part in private rounds\n",
    )  # fmt: skip
    assert store.privacy.spent_by_device("ward")["pi-09"] == {CHEAP.to_json(): 3}
    assert thinwire("privacy", "ledger", "--json", "--home", home).document["excluded"] == {"clinic": {}, "ward": {}}
