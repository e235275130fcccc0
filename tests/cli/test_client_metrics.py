"""`thinwire runs metrics`: what each client measured, and nothing of a private run."""

from __future__ import annotations

import csv
import io

import pytest

from tests.support.small_task import plan_of, task_of
from thinwire import simulate

PRIVATE = """
steps = 2
buffers = "local"
[cohort]
clients = 3
late = "drop"
deadline_s = 60
[privacy]
mode = "central"
clip = 1.0
noise_multiplier = 1.0
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("ran")
    made = simulate(task_of(), plan_of(run="rounds = 2"), clients=3, home=home, step_s=[0.1] * 3)
    return home, made


def test_each_client_has_a_row_for_each_round_and_for_the_last_model(thinwire, ran):
    home, made = ran
    found = thinwire("runs", "metrics", "latest", "--json", "--home", home).document
    rows = found["clients"]
    assert [(row["round"], row["version"], row["client"]) for row in rows] == [
        (number, version, f"sim-{client}")
        for number, version in ((1, 0), (2, 1), (None, 2))
        for client in range(3)
    ]  # fmt: skip
    last = [row["loss"] for row in rows if row["version"] == 2]
    assert sum(last) / 3 == pytest.approx(made.metrics["loss"])
    assert "train/loss" in rows[0] and rows[0]["examples"] == 24
    first = {row["client"]: row["eval/loss"] for row in made.client_records() if row["round"] == 1}
    assert {row["client"]: row["loss"] for row in rows if row["round"] == 1} == first


def test_they_are_printed_as_a_table_and_as_csv(thinwire, ran):
    home, _ = ran
    table = thinwire("runs", "metrics", "--round", "2", "--home", home).out.splitlines()
    columns = "round version client examples clipped accuracy loss train/loss"
    assert table[0].lower().split() == columns.split()
    assert [line.split()[:3] for line in table[1:]] == [["2", "1", f"sim-{n}"] for n in range(3)]
    text = thinwire("runs", "metrics", "--csv", "--home", home).out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["version"] for row in rows] == list("000111222")
    assert all(float(row["loss"]) > 0 for row in rows)
    assert thinwire("runs", "metrics", "--csv", "--json", "--home", home).code == 2


def test_a_private_run_has_none_and_says_why(thinwire, tmp_path):
    simulate(task_of(), plan_of(PRIVATE, run='rounds = 1\nevaluate = "off"'), clients=3, home=tmp_path)
    found = thinwire("runs", "metrics", "--json", "--home", tmp_path).document
    assert found["clients"] == [] and "private" in found["why"]
    said = thinwire("runs", "metrics", "--home", tmp_path)
    assert (said.code, said.out) == (0, "")
    assert "no client tells them" in said.err
