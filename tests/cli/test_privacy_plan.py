"""`thinwire privacy plan`: what a private run costs before it starts, which is what it has spent after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from thinwire.cli.privacy_cost import private_run, to_json
from thinwire.core import RunPlan
from thinwire.privacy.accounting import Budget
from thinwire.privacy.meaning import UNITS
from thinwire.privacy.noise_plan import noise_plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "private.toml"
SIZE = 9610
DISTRIBUTED = """
[run]
task = "digits"
rounds = 20
evaluate = "off"
[cohort]
clients = 20
deadline_s = 60
late = "drop"
[local]
lr = 0.5
steps = 50
buffers = "local"
[secure]
enabled = true
max_corrupt = 0.25
max_dropout = 0.25
[privacy]
mode = "distributed"
clip = 0.5
noise_multiplier = 2.0
"""


@pytest.fixture
def given(tmp_path):
    """The example with a noise multiplier in place of a target."""
    file = tmp_path / "given.toml"
    file.write_text(EXAMPLE.read_text().replace("target_epsilon = 8.0", "noise_multiplier = 2.0"))
    return file


@pytest.fixture
def planned(thinwire):
    def call(*sets, file=EXAMPLE, clients=8, size=SIZE):
        words = [word for one in sets for word in ("--set", one)]
        return thinwire("privacy", "plan", file, *words, "--clients", clients, "--size", size, "--json")

    return call


RATE = "privacy.sampling_rate=0.25"


def test_a_sampled_plan_costs_less_and_says_what_that_assumes(planned, given, thinwire):
    whole, sampled = planned(file=given).document, planned(RATE, file=given, clients=32).document
    assert (whole["clients"], sampled["clients"]) == (8, 8), "8 of 32 on average"
    assert sampled["epsilon"] < whole["epsilon"] / 2
    assert sampled["epsilon_without_sampling"] == whole["epsilon"] == whole["epsilon_without_sampling"]
    found = planned(RATE, clients=32).document
    assert found["epsilon"] <= 8.0
    assert found["noise_multiplier"] < planned().document["noise_multiplier"] / 2
    told = thinwire("privacy", "plan", EXAMPLE, "--set", RATE, "--clients", "32", "--size", SIZE).out
    assert "do not know who was sampled" in " ".join(told.split())
    assert "max_participations" not in told


def test_a_budget_of_sampled_rounds_is_counted_at_an_order_that_fits_them(planned, given):
    """At the order of a Gaussian mechanism far fewer rounds would fit."""
    sets = ("privacy.sampling_rate=0.01", "privacy.noise_multiplier=1.0", "privacy.delta=1e-5", "run.rounds=1000")
    found = planned(*sets, "privacy.budget=2.0", file=given, clients=800).document
    plan = RunPlan.load(given)
    keys = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "delta": 1e-5}
    privacy, run = plan.privacy.model_copy(update=keys), plan.run.model_copy(update={"rounds": 1000})
    release = noise_plan(plan.model_copy(update={"privacy": privacy, "run": run}), SIZE, 8).release
    assert Budget(2.0, 1e-5, release).allows({release: found["rounds_in_budget"] - 1}, release)
    assert not Budget(2.0, 1e-5, release).allows({release: found["rounds_in_budget"]}, release)
    assert not Budget(2.0, 1e-5).allows({release: found["rounds_in_budget"] // 10}, release)


def test_a_simulated_run_with_sampling_spends_less_than_without(thinwire, tmp_path, monkeypatch, given):
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    shutil.copy(EXAMPLE.with_name("task.py"), tmp_path)
    words = ("sim", given, "--clients", "4", "--set", "run.rounds=2", "--set", "local.steps=2", "--json")
    whole, sampled = thinwire(*words).document, thinwire(*words, "--set", RATE).document
    assert whole["status"] == sampled["status"] == "done"
    assert sampled["privacy"]["epsilon_run"] < whole["privacy"]["epsilon_run"] / 1.5
    told = thinwire(
        "privacy", "plan", given, "--set", "run.rounds=2", "--set", RATE, "--clients", "4", "--json"
    ).document
    assert sampled["privacy"]["epsilon_run"] == told["epsilon"]
    assert {(one["reason"], round(one["seconds"]), tuple(one["selected"])) for one in sampled["rounds"]} == {
        ("deadline", 60, ())
    }
    assert any("with probability 0.25" in note for note in sampled["notes"])


def test_what_a_plan_announces_is_what_its_simulated_run_spends(thinwire, tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    sets = ["--set", "run.rounds=2", "--set", "local.steps=2"]
    told = thinwire("privacy", "plan", EXAMPLE, *sets, "--clients", "4", "--json").document
    run_id = thinwire("sim", EXAMPLE, *sets, "--clients", "4", "--split", "iid").out.split()[-1]
    (row,) = thinwire("privacy", "ledger", "--json").document["runs"]
    assert (row["run_id"], row["reserved"], row["released"], row["participations"]) == (run_id, 2, 2, 2)
    assert (told["parameters"], told["participations"]) == (SIZE, 2)
    assert row["epsilon"] == row["epsilon_run"] == told["epsilon"]
    assert 0.98 * told["noise_multiplier"] < row["noise_to_sensitivity"] < told["noise_multiplier"]
    shown = thinwire("runs", "show").out
    assert "privacy epsilon 8 at delta = 0.001 is spent by the client that took part most, in 2 of 2 rounds" in shown
    assert "A simulation protects nothing" in shown
    assert thinwire("runs", "show", "--json").document["privacy"]["epsilon"] == told["epsilon"]
    listed = thinwire("privacy", "ledger", "--population", f"simulation of {run_id}").out
    assert "times the sensitivity of 395.7 grid steps" in listed
    assert f"{run_id}: epsilon 8 at delta = 0.001 is spent by the client that took part most" in listed


def test_the_noise_of_a_target_costs_at_most_the_target_and_the_table_trades_it(planned):
    found = planned().document
    assert found["noise_found_for"] == 8.0
    assert 7.99 < found["epsilon"] <= 8.0
    plan = RunPlan.load(EXAMPLE)
    assert found["epsilon_of_a_round"] == noise_plan(plan, SIZE, 8).epsilon(1e-3, 1)
    rows = found["table"]
    assert [row["noise_multiplier"] / found["noise_multiplier"] for row in rows] == pytest.approx(
        [0.5, 0.75, 1, 1.5, 2]
    )
    for count in ("1", "10", "20"):
        each = [row["epsilon"][count] for row in rows]
        assert each == sorted(each, reverse=True)
    assert rows[2]["epsilon"]["20"] == found["epsilon"]
    assert [row["clients"] for row in rows] == [4, 6, 8, 12, 16]
    assert rows[2]["noise_of_mean"] == found["noise_multiplier"]
    assert rows[2]["noise_norm"] == pytest.approx(found["noise_multiplier"] * SIZE**0.5 / 8)


def test_the_keys_that_are_named_for_a_smaller_epsilon_do_reach_it(planned, given):
    less = planned(file=given).document["for_less"]
    target = float(less.split()[2])
    for key in ("noise_multiplier", "max_participations"):
        value = less.partition(f"{key} = ")[2].split()[0]
        said = planned(f"privacy.{key}={value}", file=given).document
        assert said["epsilon"] <= target, key
    assert planned(f"privacy.max_participations={int(value) + 1}", file=given).document["epsilon"] > target


def test_a_budget_says_how_many_rounds_fit_and_that_the_run_would_stop(planned, given):
    found = planned("privacy.budget=8.0", "run.rounds=30", 'privacy.mechanism="discrete-gaussian"').document
    plan = RunPlan.load(EXAMPLE, {"privacy.budget": "8.0", "run.rounds": "30"})
    release = noise_plan(plan, SIZE, 8).release
    fits, budget = found["rounds_in_budget"], Budget(8.0, 1e-3)
    assert 0 < fits <= 30
    assert budget.allows({release: fits - 1}, release)
    assert fits == 30 or not budget.allows({release: fits}, release)
    short = planned("privacy.noise_multiplier=1.0", "privacy.budget=8.0", file=given).document
    assert short["rounds_in_budget"] < 20
    assert short["for_less"].startswith("For epsilon 8 in place of")
    assert f"allows a client {short['rounds_in_budget']} of 20 participations" in short["warnings"][0]
    assert f"enough for {short['rounds_in_budget']} of 20 rounds" in short["warnings"][1]


def test_a_distributed_plan_has_a_grid_bits_and_the_honest_clients_that_its_cost_counts():
    found = to_json(private_run(RunPlan.parse(DISTRIBUTED), SIZE, 20))
    assert (found["distribution"], found["honest"], found["clients"]) == ("skellam", 10, 20)
    assert 8 <= found["bits"] <= 32
    assert found["steps_of_clip"] > 0
    assert found["table"][2]["noise_of_mean"] == pytest.approx(2.0 * (20 / 10) ** 0.5), "all 20 add their part"


def test_a_distributed_plan_without_a_corrupt_client_says_that_no_client_may_read_the_models():
    """A client knows its own noise, and the epsilon of a plan with max_corrupt = 0 counts on it."""
    assert to_json(private_run(RunPlan.parse(DISTRIBUTED), SIZE, 20))["warnings"] == []
    none = DISTRIBUTED.replace("max_corrupt = 0.25", "max_corrupt = 0.04")
    (said,) = to_json(private_run(RunPlan.parse(none), SIZE, 20))["warnings"]
    assert said.startswith("[secure] max_corrupt = 0.04 of 20 clients is no client: epsilon does not hold against a")
    assert said.endswith("([secure] max_corrupt = 0.05)")


def test_the_table_of_a_distributed_plan_has_the_bits_that_each_noise_needs(thinwire, tmp_path, planned):
    file = tmp_path / "distributed.toml"
    file.write_text(DISTRIBUTED)
    rows = planned(file=file, clients=20).document["table"]
    for row in rows:
        alone = planned(f"privacy.noise_multiplier={row['noise_multiplier']}", file=file, clients=20).document
        assert row["bits"] == alone["bits"]
    assert rows[0]["bits"] != rows[-1]["bits"], "noise and width trade"
    said = thinwire("privacy", "plan", file, "--clients", 20, "--size", SIZE).out
    header = next(line for line in said.splitlines() if line.startswith("NOISE MULTIPLIER"))
    assert header.endswith("CLIENTS FOR EQUAL NOISE  BITS A VALUE")
    assert [line.split()[-1] for line in said.splitlines()[said.splitlines().index(header) + 1 :][: len(rows)]] == [
        str(row["bits"]) for row in rows
    ]
    assert {row["bits"] for row in planned().document["table"]} == {None}


OWN_NOISE = {
    "local": (),
    "example": ("privacy.records=180", "privacy.delta=1e-4", "privacy.clip=1.0", "local.steps=10"),
}


@pytest.mark.parametrize("mode", OWN_NOISE)
def test_the_cost_of_noise_that_devices_add_is_what_the_simulated_run_spends(thinwire, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    sets = [f"privacy.mode={mode}", "run.rounds=2", *OWN_NOISE[mode]]
    words = [word for one in sets for word in ("--set", one)]
    told = thinwire("privacy", "plan", EXAMPLE, *words, "--clients", "3", "--json").document
    run_id = thinwire("sim", EXAMPLE, *words, "--clients", "3", "--split", "iid").out.split()[-1]
    (row,) = thinwire("privacy", "ledger", "--json").document["runs"]
    assert (row["run_id"], row["reserved"], row["released"]) == (run_id, 2, 2)
    assert row["epsilon"] == told["epsilon"] <= 8.0
    assert 0.98 * told["noise_multiplier"] < row["noise_to_sensitivity"] < told["noise_multiplier"]
    shown = thinwire("runs", "show", "--json").document["privacy"]
    assert shown["unit"] == told["unit"] == UNITS["record" if mode == "example" else "client"]


def test_the_noise_of_n_local_updates_is_in_their_mean_and_more_clients_make_it_smaller(planned, given):
    found = planned("privacy.mode=local", file=given).document
    assert found["noise_multiplier"] == 2.0
    assert found["table"][2]["noise_of_mean"] == pytest.approx(2.0 * 2 * 8**0.5)
    assert [row["clients"] for row in found["table"]] == [2, 5, 8, 18, 32], "as the square of the noise"
    central = planned(file=given).document
    assert found["epsilon"] == pytest.approx(central["epsilon"], rel=1e-9)


def test_a_plan_of_noised_steps_says_rate_and_unit_and_has_no_column_of_clients(thinwire):
    sets = [word for one in ("privacy.mode=example", *OWN_NOISE["example"]) for word in ("--set", one)]
    said = thinwire("privacy", "plan", EXAMPLE, *sets, "--clients", 2000, "--size", SIZE).out
    assert "unit     one record of one device" in said
    assert "10 steps a round, each with a record with the probability 0.178: batch / records" in said
    assert "All records of a device together are not protected." in said
    assert "CLIENTS FOR EQUAL NOISE" not in said
    assert "clients a round the mean has as much noise" not in said
    explained = thinwire("plan", "explain", EXAMPLE, *sets).out
    assert "for one record of one device after 20 rounds" in explained


def test_a_person_reads_the_unit_the_trust_and_the_epsilon_also_in_the_explanation_of_the_plan(thinwire):
    said = thinwire("privacy", "plan", EXAMPLE, "--clients", 8, "--size", SIZE).out
    assert "one client with all its data" in said
    assert "The aggregator is trusted: it sees every update in the clear" in said
    assert "1.29 after 1 round, 8 after 20 rounds of one client" in said
    explained = thinwire("plan", "explain", EXAMPLE).out
    assert "privacy  epsilon 8 at delta = 0.001 for one client with all its data after 20 rounds, 1.29 after one" in (
        explained
    )
    assert "epsilon" not in thinwire("plan", "explain", EXAMPLE.with_name("plan.toml")).out.splitlines()[-1]


@pytest.mark.parametrize(("sets", "clients", "what"), [
    (["privacy.noise_multiplier=-1.0"], 8, "noise_multiplier"),
    (["privacy.noise_multiplier=1.0"], 8, "noise_multiplier and target_epsilon"),
    (["privacy.delta=1.5"], 8, "delta"),
    (["cohort.clients=2000"], 2000, "delta = 0.001"),
    ([], 2000, "[privacy] delta = 0.001 with 2000 clients"),
    (["privacy.target_epsilon=0.005"], 8, "target_epsilon = 0.005 needs noise_multiplier ="),
    (["privacy.target_epsilon=1e-9"], 8, "target_epsilon = 1e-09 has no noise that fits"),
    (["privacy.budget=1.0"], 8, "target_epsilon = 8.0 and budget = 1.0"),
    (["cohort.over_select=0.5"], 8, "over_select"),
])  # fmt: skip
def test_a_plan_without_a_guarantee_is_refused_with_what_why_and_try(planned, sets, clients, what):
    said = planned(*sets, clients=clients)
    assert (said.code, said.out) == (3, "")
    begins = [line.split()[0] for line in said.err.splitlines() if not line.startswith(" ")]
    assert begins == ["error:", "why:", "try:"]
    assert what in said.err


def test_a_plan_without_privacy_is_told_what_to_set(thinwire):
    said = thinwire("privacy", "plan", EXAMPLE.with_name("plan.toml"), "--size", 10)
    assert said.code == 2
    assert "has no differential privacy" in said.err
    assert '[privacy] mode = "central"' in said.err


TREE = ('privacy.mechanism="tree"', "cohort.clients=2", "run.rounds=1024")


def test_a_tree_is_compared_with_noise_of_each_rounds_own_for_the_same_epsilon(planned):
    found = planned(*TREE, "privacy.min_separation=1024", clients=4096).document
    own = planned("cohort.clients=2", "run.rounds=1024", "privacy.max_participations=1", clients=4096).document
    assert (found["participations"], found["warnings"]) == (1, [])
    assert found["noise_multiplier"] == pytest.approx(own["noise_multiplier"] * 11**0.5, rel=1e-3)
    assert "A participation costs as much as 11 nodes" in found["tree"]
    assert f"the noise of 1 node: {found['noise_multiplier']:.3g} in multiples" in found["tree"]
    assert f"it would be {own['noise_multiplier'] * 32:.3g} for the same epsilon" in found["tree"]
    assert own["tree"] is None


def test_a_person_reads_what_the_separation_needs(planned, thinwire):
    warned = planned(*TREE, "privacy.min_separation=100", clients=50).document["warnings"]
    assert "50 clients are fewer than 200, which rounds of 2 need with min_separation = 100" in warned[0]
    said = thinwire("privacy", "plan", EXAMPLE, *(w for one in TREE for w in ("--set", one)), "--clients", "8").out
    assert "in the sum of each node" in said
    assert "one tree for all rounds" in said


def test_a_run_with_a_tree_costs_what_its_plan_says_and_tells_its_separation(thinwire, tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    keys = ("cohort.clients=2", 'privacy.mechanism="tree"', "privacy.min_separation=2", "local.steps=2", "run.rounds=3")
    sets = [word for one in keys for word in ("--set", one)]
    told = thinwire("privacy", "plan", EXAMPLE, *sets, "--clients", "4", "--json").document
    thinwire("sim", EXAMPLE, *sets, "--clients", "4", "--split", "iid")
    shown = thinwire("runs", "show", "latest")
    assert "keep rounds of one client at least 2 apart" in " ".join(shown.out.split())
    spent = thinwire("runs", "show", "--json").document["privacy"]
    assert (spent["participations"], spent["released"]) == (2, 3)
    assert spent["epsilon"] == told["epsilon"]
    report = thinwire("privacy", "report", "latest", "--json").document
    told_of = report.get("report", report)["assumptions"]
    assert any("at least 2 apart" in one for one in told_of["enforced"])
    assert any("stored keys" in one for one in told_of["not_enforced"])
    assert not list(tmp_path.rglob("*tree-keys*"))
