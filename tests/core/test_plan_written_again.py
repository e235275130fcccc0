"""The text of a plan has only what differs from the defaults, and means the same plan."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.plan import RunPlan
from thinwire.core.plan_text import origins, plan_text, sparse, toml, toml_text

PLANS = sorted(
    path for path in (Path(__file__).parents[2] / "examples").rglob("*.toml") if path.name != "pyproject.toml"
)


@pytest.mark.parametrize("file", PLANS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_example_is_the_same_plan_after_it_was_written_again(file: Path) -> None:
    plan = RunPlan.load(file)
    text = plan_text(plan)
    assert RunPlan.parse(text).digest == plan.digest
    assert sparse(RunPlan.parse(text).to_json()) == sparse(plan.to_json())


def test_a_default_that_is_written_out_is_left_out_of_the_text() -> None:
    plan = RunPlan.parse('[run]\ntask = "digits"\nrounds = 20\n[local]\nlr = 0.5\n[uplink]\nfeedback = "auto"\n')
    assert plan_text(plan) == '[run]\ntask = "digits"\n\n[local]\nlr = 0.5\n'


def test_each_value_of_a_stored_plan_has_an_origin_also_a_delta_that_was_left_out() -> None:
    text = '[run]\ntask = "a"\nrounds = 20\nevaluate = "off"\n[local]\nlr = 0.5\nbuffers = "local"\nsteps = 1\n'
    text += '[cohort]\nclients = 100000\n[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\n'
    values = RunPlan.parse(text).to_json()
    found = origins(values)
    assert {name: table.keys() for name, table in found.items()} == {name: values[name].keys() for name in found}
    assert (found["run"]["task"], found["run"]["rounds"], found["privacy"]["delta"]) == ("plan", "default", "derived")
    values = RunPlan.parse(text + "delta = 1e-9\n").to_json()
    assert origins(values)["privacy"]["delta"] == "plan"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_any_values_are_read_as_they_were_written(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text({"section": table})).get("section", {}) == table
    assert tomllib.loads(f"value = {toml(table)}")["value"] == table
