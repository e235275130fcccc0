"""What may not be combined with secure aggregation: each row of the table refuses, with a reason and what to try."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thinwire.aggregation import codecs
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.plan_rules import Refusal
from thinwire.core.plan_secure_rules import FORM, secure_rules, without_secure

PLAN: dict[str, Any] = {
    "run": {"task": "digits", "evaluate": "off", "rounds": 100},
    "cohort": {"late": "drop", "deadline_s": 60},
    "local": {"lr": 0.5, "steps": 20, "buffers": "local"},
    "secure": {"enabled": True},
}
"""A plan that secure aggregation can carry out."""


def plan(**sections: dict[str, Any]) -> RunPlan:
    return RunPlan.from_json({**PLAN, **{name: PLAN.get(name, {}) | keys for name, keys in sections.items()}})


def refused(**sections: dict[str, Any]) -> list[Refusal]:
    made = plan(**sections)
    return [Refusal(what, why, hint) for when, what, why, hint in [*secure_rules(made), *without_secure(made)] if when]


def test_a_plan_that_sums_the_same_work_of_all_clients_is_not_refused():
    assert refused() == []
    assert plan().check(codecs) == []


ROWS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]] = {
    '[cohort] late = "aggregate"': ({"cohort": {"late": "aggregate"}}, {"cohort": {"late": "drop"}}),
    "[cohort] max_concurrency = 3": ({"cohort": {"max_concurrency": 3}}, {}),
    '[cohort] selection = "speed"': ({"cohort": {"selection": "speed"}}, {"cohort": {"selection": "uniform"}}),
    '[cohort] selection = "link"': ({"cohort": {"selection": "link"}}, {}),
    '[cohort] deadline_s = "auto"': ({"cohort": {"deadline_s": "auto"}}, {"cohort": {"deadline_s": 600}}),
    "[cohort] max_weight = 10.0": (
        {"secure": {"enabled": True, "weight_max": 500}},
        {"secure": {"enabled": True, "weight_max": 500}, "cohort": {"max_weight": "none"}},
    ),
    "[server] reduce = 'median'": ({"server": {"reduce": "median"}}, {}),
    '[run] init = "device"': ({"run": {"init": "device"}}, {"run": {"init": "model.safetensors"}}),
    '[secure] graph = "k-regular" and adversary = "malicious"': (
        {"secure": {"graph": "k-regular", "adversary": "malicious"}},
        {"secure": {"graph": "complete", "adversary": "malicious"}},
    ),
    "one epoch a round": ({"local": {"steps": None}}, {"local": {"steps": 20}}),
    "[local] epochs": ({"local": {"steps": None, "epochs": 2}}, {}),
    '[local] steps = "auto"': ({"local": {"steps": "auto"}}, {}),
    "[local] partial = true": ({"local": {"partial": True}}, {"local": {"partial": False}}),
    '[local] buffers = "average"': ({"local": {"buffers": "average"}}, {"local": {"buffers": "frozen"}}),
    "[uplink] codec = 'topk(0.01)'": ({"uplink": {"codec": "topk(0.01)"}}, {"uplink": {}}),
    "[uplink] codec = 'identity'": ({"uplink": {"codec": "identity"}}, {}),
    "[uplink] codec = 'dgc(0.01)'": ({"uplink": {"codec": "dgc(0.01)"}}, {}),
    "[uplink.layers]": ({"uplink": {"layers": {"*.bias": "fp16"}}}, {}),
    "[uplink] ladder": ({"uplink": {"ladder": ["fp16", "topk(0.01) > int8"]}}, {}),
    "[uplink] warmup": ({"uplink": {"warmup": {"rounds": 2, "ratios": [0.5]}}}, {}),
    "momentum correction in [uplink]": ({"uplink": {"momentum": 0.9}}, {}),
    '[uplink] feedback = "ef21"': ({"uplink": {"feedback": "ef21"}}, {"uplink": {"feedback": "classic"}}),
    '[uplink] feedback and adversary = "malicious"': (
        {"uplink": {"feedback": "classic"}, "secure": {"adversary": "malicious"}},
        {"secure": {"adversary": "malicious"}},
    ),
    "[secure] support = 0.005 and [run] rounds = 100": (
        {"secure": {"support": 0.005}}, {"secure": {"support": 0.01}},
    ),
    '[run] evaluate = "clients" and no loss in [secure] metrics': (
        {"run": {"evaluate": "clients"}},
        {"run": {"evaluate": "clients"}, "secure": {"metrics": {"loss": 10.0}}},
    ),
    '[run] evaluate = "clients" and no accuracy in [secure] metrics': (
        {"run": {"evaluate": "clients", "target": {"value": 0.9}}, "secure": {"metrics": {"loss": 10.0}}},
        {"run": {"evaluate": "clients", "target": {"value": 0.9}},
         "secure": {"metrics": {"loss": 10.0, "accuracy": 1.0}}},
    ),
    "[run] fraction_evaluate = 0.5": (
        {"run": {"evaluate": "clients", "fraction_evaluate": 0.5}, "secure": {"metrics": {"loss": 10.0}}},
        {"run": {"evaluate": "clients"}, "secure": {"metrics": {"loss": 10.0}}},
    ),
    '[secure] metrics and [run] evaluate = "off"': (
        {"secure": {"metrics": {"loss": 10.0}}}, {"secure": {"metrics": {"train/loss": 10.0}}},
    ),
    '[secure] histograms and [run] evaluate = "off"': ({"secure": {"histograms": ["sick"]}}, {}),
    "[secure] with a metric or a histogram of the name 'weight'": (
        {"run": {"evaluate": "clients", "metric": "weight"}, "secure": {"metrics": {"weight": 1.0}}},
        {"run": {"evaluate": "clients", "metric": "sick_auc"}, "secure": {"histograms": ["sick"]}},
    ),
    "[secure] with a metric or a histogram of the name 'sick/0/5'": (
        {"run": {"evaluate": "clients", "metric": "sick_auc"},
         "secure": {"metrics": {"sick/0/5": 1.0}, "histograms": ["sick"]}},
        {"run": {"evaluate": "clients", "metric": "sick_auc"}, "secure": {"histograms": ["sick"]}},
    ),
    "[secure] with a metric or a histogram of the name 'sick_auc'": (
        {"run": {"evaluate": "clients", "metric": "sick_auc"},
         "secure": {"metrics": {"sick_auc": 1.0}, "histograms": ["sick"]}},
        {"run": {"evaluate": "clients", "metric": "sick_f1"}, "secure": {"histograms": ["sick"]}},
    ),
    "[secure] with a metric or a histogram of the name 'a/b'": (
        {"run": {"evaluate": "clients", "metric": "a/b_f1"}, "secure": {"histograms": ["a/b"]}}, {},
    ),
    "[secure] max_corrupt = 0.5 and max_dropout = 0.5": (
        {"secure": {"max_corrupt": 0.5, "max_dropout": 0.5}},
        {"secure": {"max_corrupt": 0.5, "max_dropout": 0.25}},
    ),
    "[secure] max_corrupt = 0.4 and max_dropout = 0.3": (
        {"secure": {"max_corrupt": 0.4, "max_dropout": 0.3, "adversary": "malicious"}},
        {"secure": {"max_corrupt": 0.4, "max_dropout": 0.3}},
    ),
    "[cohort] over_select = 0.3 and max_dropout = 0.1": (
        {"cohort": {"clients": 0.5, "over_select": 0.3}},
        {"cohort": {"clients": 0.5, "over_select": 0.3}, "secure": {"max_dropout": 0.24}},
    ),
    "over-selection cuts 30 of 130 clients": (
        {"cohort": {"clients": 100, "over_select": 0.3}},
        {"cohort": {"clients": 100, "over_select": 0.3}, "secure": {"max_dropout": 0.24}},
    ),
    "secure aggregation of 2 clients": ({"cohort": {"clients": 2}}, {"cohort": {"clients": 3}}),
    "no threshold withstands a malicious aggregator": (
        {"cohort": {"clients": 10}, "secure": {"adversary": "malicious", "max_dropout": 0.5}}, {},
    ),
}  # fmt: skip
"""What is refused: a plan, and one that was changed as the row says."""


@pytest.mark.parametrize("row", ROWS)
def test_a_row_refuses_with_a_reason_and_what_to_try(row):
    wrong, _ = ROWS[row]
    found = refused(**wrong)
    mine = [refusal for refusal in found if row in refusal.what]
    assert len(mine) == 1, found
    assert mine[0].why
    assert mine[0].hint
    assert not mine[0].why.endswith(".")


def test_a_refusal_of_numbers_is_a_sentence_of_its_own():
    (found,) = refused(cohort={"clients": 10}, secure={"adversary": "malicious", "max_dropout": 0.5})
    assert found.what.startswith("no threshold withstands a malicious aggregator with [secure] max_corrupt = 0.1")
    (found,) = refused(cohort={"late": "aggregate"})
    assert found.what == FORM.format('[cohort] late = "aggregate"')


@pytest.mark.parametrize("row", ROWS)
def test_the_plan_that_a_row_offers_instead_is_not_refused(row):
    _, right = ROWS[row]
    assert refused(**right) == []


@pytest.mark.parametrize("row", ROWS)
def test_no_row_refuses_a_plan_without_secure_aggregation(row):
    wrong, _ = ROWS[row]
    assert refused(**wrong | {"secure": {"enabled": False}}) == []


@pytest.mark.parametrize("row", ROWS)
def test_the_check_of_a_plan_has_the_refusals_of_the_table(row):
    assert {refusal.what for refusal in refused(**ROWS[row][0])} <= {
        refusal.what for refusal in plan(**ROWS[row][0]).check(codecs)
    }


OWN: dict[str, dict[str, dict[str, Any]]] = {
    '[secure] enabled = true with mode = "buffered"': {"cohort": {"mode": "buffered"}},
    '[local] durability = "exit" with [secure] enabled = true': {"local": {"durability": "exit"}},
    "[secure] enabled = true with [local] overlap": {"local": {"overlap": {"max_delay": 1}}},
    "[run] algorithm = 'scaffold' with [secure] enabled = true": {"run": {"algorithm": "scaffold"}},
    "[run] algorithm = 'feddyn' with [secure] enabled = true": {"run": {"algorithm": "feddyn"}},
}


@pytest.mark.parametrize("row", OWN)
def test_what_has_rules_of_its_own_refuses_secure_aggregation_in_them(row):
    assert any(row in refusal.what for refusal in plan(**OWN[row]).check(codecs))


def test_every_row_of_the_table_is_tried():
    """A row that no plan of this test meets could be one that never refuses."""
    fired = set[int]()
    for wrong, _ in ROWS.values():
        if not isinstance(wrong.get("cohort", {}).get("clients"), int):  # it replaces the rows on shares
            fired |= {place for place, (when, *_) in enumerate(secure_rules(plan(**wrong))) if when}
    assert fired == set(range(len(secure_rules(plan()))))


@pytest.mark.parametrize(
    ("key", "value"), [("bits", 4), ("metrics", {"loss": 1.0}), ("rotate", 1024), ("clip", 2.0), ("graph", "complete")]
)
def test_a_key_without_secure_aggregation_has_no_effect_and_is_refused(key, value):
    found = refused(secure={"enabled": False, key: value})
    assert [refusal.what for refusal in found] == [f"[secure] {key} = {json.dumps(value)} without enabled = true"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("support", 0), ("support", 1.5), ("bits", 1), ("bits", 31), ("max_corrupt", 1), ("rotate", 3), ("rotate", 100),
     ("clip", "some"), ("clip", 0), ("weight_max", 0), ("metrics", {"loss": 0}), ("graph", "ring")],
)  # fmt: skip
def test_a_value_that_no_round_could_have_is_no_plan(key, value):
    with pytest.raises(PlanError, match=rf"\[secure\] {key}"):
        plan(secure={key: value})
