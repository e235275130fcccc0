"""What SCAFFOLD and FedDyn are refused with, and what travels under them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.aggregation import codecs
from thinwire.core import Layout, RunPlan
from thinwire.core.layout import SEGMENT_FLOATS

DROP = {"cohort.late": "drop"}


def refusals(algorithm: str, **more: str) -> list[str]:
    overrides = {"run.algorithm": algorithm, **DROP, **{key.replace("__", "."): value for key, value in more.items()}}
    plan = RunPlan.parse('[run]\ntask = "digits"\n[local]\nlr = 0.5\n', overrides=overrides)
    return [refusal.what for refusal in plan.check(codecs)]


@pytest.mark.parametrize(
    ("algorithm", "more", "what"),
    [
        ("fedavg", {"run__alpha": "0.2"}, "[run] alpha = 0.2 with algorithm = 'fedavg'"),
        ("scaffold", {"run__alpha": "0.2"}, "[run] alpha = 0.2 with algorithm = 'scaffold'"),
        ("scaffold", {"cohort__late": "aggregate"}, "with late updates that count less"),
        ("feddyn", {"cohort__late": "aggregate"}, "with late updates that count less"),
        ("scaffold", {"local__optimizer": "adam"}, "with [local] optimizer = 'adam'"),
        ("scaffold", {"uplink__codec": "'twobit(1)'"}, "with 'twobit(1)'"),
        ("scaffold", {"uplink__layers.weight": "'powersgd(2)'"}, "with 'powersgd(2)'"),
        ("scaffold", {"uplink__feedback": "ef21"}, 'with [uplink] feedback = "ef21"'),
        ("feddyn", {"uplink__feedback": "ef21"}, 'with [uplink] feedback = "ef21"'),
        ("scaffold", {"cohort__mode": "buffered"}, 'with [cohort] mode = "buffered"'),
        ("feddyn", {"secure__enabled": "true"}, "with [secure] enabled"),
        ("scaffold", {"privacy__mode": "central"}, 'with [privacy] mode = "central"'),
        ("scaffold", {"local__durability": "exit"}, 'with [local] durability = "exit"'),
        ("scaffold", {"local__partial": "true"}, "with [local] partial = true"),
        ("scaffold", {"local__steps": "1", "uplink__momentum": "0.9"}, "with momentum correction"),
        ("feddyn", {"local__overlap.max_delay": "1"}, "with [local] overlap"),
        ("feddyn", {"local__prox": "0.1"}, "with [local] prox"),
        ("feddyn", {"local__partial": "true"}, "with [local] partial"),
        ("feddyn", {"local__steps": "'auto'"}, 'with [local] steps = "auto"'),
        ("feddyn", {"server__optimizer": "fedadam"}, "with a server optimizer"),
        ("feddyn", {"server__lr": "0.5"}, "with a server optimizer"),
    ],
)
def test_what_cannot_hold_beside_an_algorithm_is_refused(algorithm: str, more: dict[str, str], what: str) -> None:
    found = refusals(algorithm, **more)
    assert any(what in refusal for refusal in found), found


@pytest.mark.parametrize(
    ("codec", "why"), [("twobit(1)", "has to contract at each call"), ("eden(0.3)", "would wait in the residual")]
)
def test_the_reason_why_scaffold_refuses_a_codec_is_that_of_its_differences(codec: str, why: str) -> None:
    overrides = {"run.algorithm": "scaffold", **DROP, "uplink.codec": f"'{codec}'"}
    plan = RunPlan.parse('[run]\ntask = "digits"\n[local]\nlr = 0.5\n', overrides=overrides)
    (refusal,) = plan.check(codecs)
    assert why in refusal.why


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("scaffold", {}),
        ("feddyn", {"run__alpha": "0.01"}),
        ("scaffold", {"cohort__late": "aggregate", "cohort__staleness_exponent": "0"}),
        ("scaffold", {"local__momentum": "0.9", "local__schedule": "cosine"}),
        ("scaffold", {"server__optimizer": "fedadam", "downlink__codec": "'int8'", "uplink__feedback": "none"}),
        ("feddyn", {"local__optimizer": "adam"}),
        ("feddyn", {"uplink__codec": "'powersgd(2)'"}),
    ],
)
def test_what_can_hold_is_not_refused(algorithm: str, more: dict[str, str]) -> None:
    assert refusals(algorithm, **more) == []


@given(st.lists(st.sampled_from([0, 1, 5, SEGMENT_FLOATS // 2, SEGMENT_FLOATS, SEGMENT_FLOATS + 1]), max_size=6))
def test_control_variates_are_cut_as_the_model_is_and_stand_behind_it(sizes: list[int]) -> None:
    layout = Layout.of({f"t{i}": (size,) for i, size in enumerate(sizes)})
    travels = layout.with_control
    assert (travels.size, travels.model_size) == (2 * layout.size, layout.size)
    assert travels.model_segments == layout.segments
    behind = [(s.start - layout.size, s.stop - layout.size) for s in travels.control_segments]
    assert behind == [(s.start, s.stop) for s in layout.segments]
    assert [t.name for t in travels.trained[len(sizes) :]] == [f"control/{t.name}" for t in layout.trained]


def test_what_travels_has_a_digest_of_its_own_and_the_models_buffers_once() -> None:
    layout = Layout.of({"w": (2,)})
    assert layout.with_control.digest != layout.digest
    assert layout.with_control.buffers == layout.buffers
    assert Layout.of({}).with_control.size == 0
