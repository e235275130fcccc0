"""A reduction compares updates of one round, in the clear and of one model: what contradicts that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.aggregation import codecs
from thinwire.compression.catalog import steps
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import Refusal


def refused(reduce: str = "median", **sections: dict[str, Any]) -> list[Refusal]:
    raw = {
        "run": {"task": "t"}, "local": {"lr": 1.0}, **sections,
        "cohort": {"late": "drop", **sections.get("cohort", {})},
        "server": {"reduce": reduce, **sections.get("server", {})},
    }  # fmt: skip
    return RunPlan.from_json(raw).check(codecs)


@pytest.mark.parametrize(
    ("reduce", "sections", "said"),
    [
        ("median", {"cohort": {"late": "aggregate"}}, 'with [cohort] late = "aggregate"'),
        ("krum(1)", {"cohort": {"mode": "buffered", "late": "aggregate"}}, 'with mode = "buffered"'),
        ("krum(1)", {"local": {"lr": 1.0, "overlap": {}}}, "with [local] overlap"),
        ("krum(1)", {"uplink": {"feedback": "ef21"}}, 'with [uplink] feedback = "ef21"'),
        ("median", {"run": {"task": "t", "algorithm": "scaffold"}}, 'with [run] algorithm = "scaffold"'),
        ("median", {"secure": {"enabled": True}}, "[server] reduce = 'median'"),
        ("median", {"privacy": {"mode": "central", "clip": 1.0, "noise_multiplier": 1.0}}, "reduce = 'median'"),
        ("median", {"privacy": {"mode": "local", "clip": 1.0, "noise_multiplier": 1.0}}, "reduce = 'median'"),
        ("median", {"privacy": {"mode": "example", "clip": 1.0, "noise_multiplier": 1.0}}, "reduce = 'median'"),
        ("median", {"cohort": {"clients": 1}}, "[cohort] clients = 1"),
        ("krum(2)", {"cohort": {"clients": 6}}, "[cohort] clients = 6"),
        ("trimmed(3)", {"cohort": {"clients": 6}}, "[cohort] clients = 6"),
        ("krum(2)", {"cohort": {"min_updates": 4}}, "[cohort] min_updates = 4"),
        ("median", {"uplink": {"codec": "topk(0.1) > int8"}}, "codec = 'topk(0.1) > int8'"),
        ("trimmed(0.2)", {"uplink": {"layers": {"*.w": "randk(0.1)"}}}, "codec = 'randk(0.1)'"),
        ("median", {"uplink": {"ladder": ["fp16", "ternary"]}}, "codec = 'ternary'"),
        ("medain", {}, "no reduction 'medain'"),
        ("mean", {"server": {"max_norm": 1.0}, "secure": {"enabled": True}}, "max_norm = 1.0 with [secure]"),
        ("mean", {"server": {"max_norm": "q0.9"}, "uplink": {"feedback": "ef21"}}, 'max_norm = "q0.9" with [uplink]'),
    ],
)
def test_what_contradicts_a_reduction_is_refused_with_its_reason(
    reduce: str, sections: dict[str, Any], said: str
) -> None:
    found = [one for one in refused(reduce, **sections) if said in one.what]
    assert found, [one.what for one in refused(reduce, **sections)]
    assert all(one.why and one.hint for one in found)


@pytest.mark.parametrize("reduce", ["median", "krum(1)", "geometric-median", "clipped(1)", "trimmed(0.1)"])
def test_a_reduction_goes_with_the_default_codec_and_a_bound_on_norms(reduce: str) -> None:
    assert refused(reduce, server={"max_norm": "q0.9"}) == []
    assert refused(reduce, cohort={"clients": 20}, uplink={"codec": "int8"}) == []


def test_a_choice_of_whole_updates_may_have_sparse_ones() -> None:
    assert refused("krum(1)", uplink={"codec": "topk(0.1) > int8"}) == []


def test_each_sparsifier_says_that_it_leaves_zeros() -> None:
    declared = {name: stage.leaves_zeros for name, stage in steps.items()}
    assert all(declared[name] for name, stage in steps.items() if stage.role == "sparsifier")
    assert not any(declared[name] for name in ("identity", "int8", "eden", "fp16", "sign"))
