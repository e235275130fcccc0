"""A device declines each protected plan that `thinwire plan check` refuses, whatever its aggregator checked."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from tests.client.test_policy import FACTS, PLAN
from tests.core.test_plan_secure_rules import OWN, ROWS
from tests.core.test_plan_secure_rules import plan as table_plan
from thinwire.aggregation import codecs
from thinwire.client.policy import Policy
from thinwire.client.policy_rules import decide
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.plan_text import plan_keys

NOISE = {"clip": 1.0, "noise_multiplier": 1.0}
PROTECTED: dict[str, dict[str, dict[str, Any]]] = {
    "secure": {"secure": {"enabled": True}},
    "central": {"privacy": {"mode": "central", **NOISE}},
    "distributed": {"privacy": {"mode": "distributed", **NOISE}, "secure": {"enabled": True, "max_dropout": 0.2}},
    "local": {"privacy": {"mode": "local", **NOISE}},
    "example": {"privacy": {"mode": "example", "records": 100, **NOISE}},
}
OTHERS = (2, 0.5, "auto", "device", "topk(0.01) > int8", "median")
OPTIMIZERS = ("optimizer", "momentum", "beta2", "tau")  # of [server]: a device need not know the aggregator's
FEWEST = 20  # plans of each kind that contradict themselves, and as many that do not: else the test would be blind


def changed(sections: dict[str, dict[str, Any]]) -> Iterator[RunPlan]:
    """Yield the plan with each of its keys at other values of that key, those that no plan has left out."""
    base = {name: {**PLAN[name], **sections.get(name, {})} for name in PLAN if name != "plan_version"}
    base["cohort"] = {**base["cohort"], "clients": 10}
    for section, key, field in plan_keys():
        if section == "server" and key in OPTIMIZERS:
            continue
        literals = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        for value in (True, False) if field.annotation is bool else literals or OTHERS:
            with contextlib.suppress(PlanError):
                yield RunPlan.from_json({**base, section: {**base[section], key: value}})


@pytest.mark.parametrize("kind", PROTECTED)
def test_a_protected_plan_is_declined_wherever_the_check_refuses_it(kind):
    found = Counter[bool]()
    for plan in changed(PROTECTED[kind]):
        if plan.is_protected:
            is_refused = bool(plan.check(codecs))
            found[is_refused] += 1
            declined = decide(Policy(), plan.run.task, "train", plan.to_json(), FACTS)
            assert (declined is not None) == is_refused, (plan.check(codecs), declined)
    assert min(found[True], found[False]) >= FEWEST


@pytest.mark.parametrize("row", [*ROWS, *OWN])
def test_each_combination_that_the_table_of_secure_plans_refuses_is_refused_again_by_the_device(row):
    wrong = ROWS[row][0] if row in ROWS else OWN[row]
    declined = decide(Policy(), "digits", "train", table_plan(**wrong).to_json(), FACTS)
    assert declined is not None
    assert declined.rule in ("plan", "secure")


@pytest.mark.parametrize("kind", ["off", *PROTECTED])
@pytest.mark.parametrize("key", ["optimizer", "reduce"])
@pytest.mark.parametrize("place", ["hostile_module:Thing", "{}/hostile_module.py:Thing"])
def test_no_code_is_imported_that_a_plan_names_for_its_aggregator(kind, key, place, tmp_path, monkeypatch):
    """An optimizer may be any module or file of the machine that makes the step, and this is another machine."""
    code, imported = tmp_path / "hostile_module.py", tmp_path / "imported"
    code.write_text(f"open({str(imported)!r}, 'w').close()\nclass Thing: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = RunPlan.from_json({**PLAN, **PROTECTED.get(kind, {}), "server": {key: place.format(tmp_path)}})
    decide(Policy(), "ecg", "train", plan.to_json(), FACTS)
    assert not imported.exists()


@pytest.mark.parametrize("kind", ["off", *PROTECTED])
@pytest.mark.parametrize(
    ("key", "value"), [("min_updates", float("inf")), ("min_updates", 1e308), ("over_select", 1e308)]
)
def test_numbers_that_overflow_are_declined_and_end_no_thread(kind, key, value):
    plan = {**PLAN, **PROTECTED.get(kind, {})}
    policy = Policy(min_cohort=2)
    assert decide(policy, "ecg", "train", {**plan, "cohort": {"clients": 5, key: value}}, FACTS) is not None
