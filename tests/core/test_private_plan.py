"""Plans with differential privacy: what would break the protection is refused, with the reason and what to try."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.codec_examples import SPECS, layout_of
from thinwire.aggregation import codecs
from thinwire.compression import parse
from thinwire.core import Key, RunPlan
from thinwire.core.errors import CodecError, PlanError
from thinwire.core.plan_rules import Refusal
from thinwire.core.types import Vector

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "private.toml"
TABLES = {
    "run": {"evaluate": '"off"'},
    "cohort": {"deadline_s": "60", "late": '"drop"', "clients": "10"},
    "local": {"steps": "5", "buffers": '"local"'},
    "privacy": {"mode": '"central"', "clip": "1.0", "noise_multiplier": "1.0"},
}
TREE = {"privacy__mechanism": '"tree"'}


def plan(**changes: str | None) -> RunPlan:
    """A private plan; `cohort__late='"aggregate"'` changes a key, and None leaves it out."""
    tables: dict[str, dict[str, str | None]] = {name: dict(keys) for name, keys in TABLES.items()}
    for place, value in changes.items():
        table, key = place.split("__")
        tables.setdefault(table, {})[key] = value
    text = '[run]\ntask = "t"\n' + "\n".join(f"{k} = {v}" for k, v in tables.pop("run").items() if v)
    text += "\n[local]\nlr = 0.1\n" + "\n".join(f"{k} = {v}" for k, v in tables.pop("local").items() if v)
    for name, keys in tables.items():
        text += f"\n[{name}]\n" + "\n".join(f"{k} = {v}" for k, v in keys.items() if v)
    return RunPlan.parse(text)


def refused(**changes: str | None) -> list[Refusal]:
    try:
        return plan(**changes).check(codecs)
    except PlanError as error:
        return [Refusal(error.what, error.why, error.hint)]


def test_the_plan_that_the_others_differ_from_is_valid() -> None:
    assert not refused()
    assert not RunPlan.load(EXAMPLE).check(codecs)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"privacy__clip": None}, "no [privacy] clip"),
        ({"privacy__noise_multiplier": None}, "neither noise_multiplier nor target_epsilon"),
        ({"privacy__target_epsilon": "8.0"}, "noise_multiplier and target_epsilon"),
        ({"privacy__noise_multiplier": "1e6"}, "noise_multiplier = 1000000.0"),
        ({"privacy__noise_multiplier": "1e-6"}, "noise_multiplier = 1e-06"),
        ({"privacy__noise_multiplier": "-1.0"}, "noise_multiplier"),
        ({"privacy__noise_multiplier": "nan"}, "noise_multiplier"),
        ({"privacy__clip": "0.0"}, "clip"),
        ({"privacy__delta": "0.1"}, "delta = 0.1"),
        ({"privacy__delta": "1.5"}, "delta"),
        ({"privacy__delta": "0.1", "cohort__clients": '"all"'}, "delta = 0.1"),
        ({"privacy__delta": "0.1", "cohort__clients": "0.5"}, "delta = 0.1"),
        (
            {"privacy__noise_multiplier": None, "privacy__target_epsilon": "8.0", "privacy__budget": "4.0"},
            "budget = 4.0",
        ),
        ({"privacy__noise_multiplier": None, "privacy__target_epsilon": "1e9"}, "an epsilon of 1e+09"),
        ({"privacy__budget": "101.0"}, "an epsilon of 101"),
        ({"privacy__max_participations": "30"}, "max_participations = 30"),
        ({"privacy__adaptive": "true", "cohort__clients": '"all"'}, 'adaptive = true and [cohort] clients = "all"'),
        ({"privacy__adaptive": "true", "privacy__clipping": '"per-layer"'}, 'clipping = "per-layer"'),
        ({"privacy__mode": '"distributed"'}, "[secure] enabled = false"),
        ({"privacy__records": "1000"}, "records = 1000"),
        ({"privacy__mechanism": '"skellam"'}, 'mechanism = "skellam"'),
        ({"privacy__restart_every": "5"}, "restart_every = 5"),
        ({"privacy__min_separation": "5"}, "min_separation = 5"),
        ({**TREE, "privacy__restart_every": "30"}, "restart_every = 30"),
        ({**TREE, "privacy__min_separation": "30"}, "min_separation = 30"),
        ({**TREE, "privacy__min_separation": "0"}, "min_separation"),
        ({**TREE, "privacy__adaptive": "true"}, "adaptive = true"),
        ({**TREE, "cohort__clients": '"all"'}, 'clients = "all"'),
        ({**TREE, "server__optimizer": '"fedadam"'}, 'optimizer = "fedadam"'),
        ({**TREE, "server__schedule": '"linear"'}, "[server] schedule"),
        ({**TREE, "privacy__mode": '"distributed"', "secure__enabled": "true"}, 'mechanism = "tree"'),
        ({"cohort__late": '"aggregate"'}, 'late = "aggregate"'),
        ({"cohort__over_select": "0.3"}, "over_select = 0.3"),
        ({"cohort__max_concurrency": "3"}, "max_concurrency = 3"),
        ({"cohort__deadline_s": None}, 'deadline_s = "auto"'),
        ({"cohort__max_weight": "3.0"}, "max_weight = 3.0"),
        ({"cohort__selection": '"speed"'}, '[privacy] mode = "central"'),
        ({"cohort__mode": '"buffered"', "cohort__clients": '"all"'}, '[privacy] mode = "central"'),
        ({"downlink__codec": '"int8"'}, "[downlink] codec = 'int8'"),
        ({"run__evaluate": '"clients"'}, 'evaluate = "clients"'),
        ({"run__init": '"device"'}, 'init = "device"'),
        ({"run__algorithm": '"scaffold"'}, "scaffold"),
        ({"uplink__feedback": '"ef21"'}, "ef21"),
        ({"local__steps": None}, "one epoch a round"),
        ({"local__steps": '"auto"'}, 'steps = "auto"'),
        ({"local__partial": "true"}, "partial = true"),
        ({"local__buffers": '"average"'}, 'buffers = "average"'),
        ({"local__durability": '"exit"'}, 'durability = "exit"'),
        ({"secure__enabled": "true"}, "[secure] enabled = true"),
        ({"server__reduce": '"median"'}, "reduce"),
    ],
)
def test_what_would_break_the_protection_is_refused(changes: dict[str, str | None], what: str) -> None:
    found = refused(**changes)
    assert any(what in one.what for one in found), found
    assert all(one.why and one.hint for one in found)


def test_a_plan_with_tree_aggregation_is_valid() -> None:
    assert not refused(**TREE)
    assert not refused(**TREE, server__optimizer='"fedavgm"')
    assert not refused(**TREE, privacy__restart_every="8", privacy__min_separation="4", privacy__max_participations="3")


DISTRIBUTED = {"privacy__mode": '"distributed"', "secure__enabled": "true", "secure__max_dropout": "0.2"}


def test_a_distributed_plan_is_valid() -> None:
    assert not refused(**DISTRIBUTED)
    assert not refused(**DISTRIBUTED, privacy__adaptive="true")
    assert not refused(**DISTRIBUTED, privacy__clipping='"per-layer"')
    assert not refused(**DISTRIBUTED, secure__support="0.1", secure__rotate="1024")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"secure__enabled": "false"}, "[secure] enabled = false"),
        ({"cohort__clients": '"all"'}, '[cohort] clients = "all"'),
        ({"cohort__over_select": "0.1"}, "over_select"),
        ({"secure__rotate": "false"}, "[secure] rotate = false"),
        ({"secure__clip": "1.0"}, "[secure] clip = 1.0"),
        ({"secure__bits": "6"}, "[secure] bits = 6"),
        ({"secure__weight_max": "10"}, "weight_max = 10"),
        ({"secure__metrics": "{ loss = 1.0 }"}, "metrics"),
        ({"uplink__feedback": '"classic"'}, '[uplink] feedback = "classic"'),
        ({"secure__max_corrupt": "0.9"}, "max_corrupt"),
    ],
)
def test_what_would_break_noise_that_clients_add_is_refused(changes: dict[str, str | None], what: str) -> None:
    found = refused(**(DISTRIBUTED | changes))
    assert any(what in one.what for one in found), found
    assert all(one.why and one.hint for one in found)


LOCAL = {"privacy__mode": '"local"'}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"privacy__mechanism": '"skellam"'},
        {"cohort__late": '"aggregate"'},
        {"cohort__over_select": "0.3"},
        {"uplink__codec": "'eden(1)'"},
        {"privacy__clipping": '"per-layer"'},
        {"uplink__codec": "'topk(0.1) > int8'", "uplink__feedback": '"none"'},
    ],
)
def test_what_follows_the_noise_of_the_device_is_free(more: dict[str, str | None]) -> None:
    assert not refused(**LOCAL, **more)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"uplink__codec": "'topk(0.1) > int8'"}, "feedback = 'auto'"),
        ({"uplink__feedback": '"classic"'}, "feedback = 'classic'"),
        ({"privacy__adaptive": "true"}, "adaptive = true"),
        ({"uplink__feedback": '"ef21"', "uplink__codec": "'topk(0.1)'"}, "ef21"),
        ({"secure__enabled": "true"}, "[secure] enabled = true"),
        ({"run__evaluate": '"clients"'}, 'evaluate = "clients"'),
        ({"run__init": '"device"'}, 'init = "device"'),
        ({"run__algorithm": '"feddyn"'}, "feddyn"),
        ({"privacy__clip": None}, "no [privacy] clip"),
        ({"privacy__delta": "0.1"}, "delta = 0.1"),
        ({"cohort__deadline_s": None}, 'deadline_s = "auto"'),
        ({"cohort__max_weight": "3.0"}, "max_weight = 3.0"),
        ({"local__steps": None}, "one epoch a round"),
        ({"local__steps": '"auto"'}, 'steps = "auto"'),
        ({"local__partial": "true"}, "partial = true"),
        ({"local__buffers": '"average"'}, 'buffers = "average"'),
        ({"local__durability": '"exit"'}, 'durability = "exit"'),
        ({"server__reduce": '"median"'}, "reduce"),
    ],
)
def test_a_device_that_noises_its_own_update_tells_nothing_else(changes: dict[str, str | None], what: str) -> None:
    found = refused(**LOCAL, **changes)
    assert any(what in one.what for one in found), found
    assert all(one.why and one.hint for one in found)


EXAMPLES = {"privacy__mode": '"example"', "privacy__records": "1000", "privacy__delta": "1e-4"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"privacy__noise_multiplier": None, "privacy__target_epsilon": "8.0", "privacy__budget": "9.0"},
        {"cohort__late": '"aggregate"'},
        {"cohort__clients": "20000"},
        {"uplink__codec": "'topk(0.1) > int8'"},
        {"local__prox": "0.1", "local__optimizer": '"adam"'},
    ],
)
def test_what_follows_the_noise_of_each_step_is_free(more: dict[str, str | None]) -> None:
    assert not refused(**(EXAMPLES | more))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"privacy__records": None}, "no [privacy] records"),
        ({"privacy__records": "31"}, "records = 31 and [local] batch = 32"),
        ({"privacy__delta": "1e-3"}, "delta = 0.001 and records = 1000"),
        ({"privacy__mechanism": '"skellam"'}, 'mechanism = "skellam"'),
        ({"privacy__adaptive": "true"}, "adaptive = true"),
        ({"privacy__clipping": '"per-layer"'}, 'clipping = "per-layer"'),
        ({"local__accumulate": "2"}, "accumulate = 2"),
        ({"local__clip_grad": "1.0"}, "clip_grad = 1.0"),
        ({"local__steps": None}, "one epoch a round"),
        ({"local__steps": '"auto"'}, 'steps = "auto"'),
        ({"local__partial": "true"}, "partial = true"),
        ({"local__buffers": '"average"'}, 'buffers = "average"'),
        ({"run__evaluate": '"clients"'}, 'evaluate = "clients"'),
        ({"run__init": '"device"'}, 'init = "device"'),
        ({"run__algorithm": '"scaffold"'}, "scaffold"),
        ({"uplink__feedback": '"ef21"', "uplink__codec": "'topk(0.1)'"}, "ef21"),
        ({"secure__enabled": "true"}, "[secure] enabled = true"),
        ({"cohort__mode": '"buffered"', "cohort__clients": '"all"'}, '[privacy] mode = "example"'),
    ],
)
def test_steps_whose_cost_is_not_known_are_refused(changes: dict[str, str | None], what: str) -> None:
    found = refused(**(EXAMPLES | changes))
    assert any(what in one.what for one in found), found
    assert all(one.why and one.hint for one in found)


SAMPLED = {"privacy__sampling_rate": "0.1", "cohort__clients": None, "cohort__min_updates": None}


def test_a_sampled_plan_is_valid() -> None:
    assert not refused(**SAMPLED)
    assert not refused(**SAMPLED, cohort__wait_for="20")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"privacy__mode": '"distributed"', "secure__enabled": "true", "cohort__clients": "20"}, "sampling_rate = 0.1"),
        ({"cohort__clients": "20"}, "[cohort] clients = 20"),
        ({"cohort__clients": "0.5"}, "[cohort] clients = 0.5"),
        ({"cohort__min_updates": "3"}, "[cohort] min_updates = 3"),
        ({"cohort__selection": '"link"'}, '[cohort] selection = "link"'),
        ({"cohort__requires": "{ cores = 4 }"}, "[cohort.requires]"),
        ({"cohort__over_select": "0.1"}, "over_select = 0.1"),
        ({"cohort__max_concurrency": "3"}, "max_concurrency = 3"),
        ({"cohort__mode": '"buffered"'}, '[privacy] mode = "central"'),
        ({"privacy__max_participations": "5"}, "max_participations = 5"),
        ({"privacy__adaptive": "true"}, "adaptive = true"),
        ({"uplink__ladder": '["identity", "int8"]', "uplink__codec": None}, "[uplink] ladder"),
        ({"privacy__sampling_rate": "1.5"}, "sampling_rate"),
        ({"privacy__sampling_rate": "0.0"}, "sampling_rate"),
    ],
)
def test_what_would_end_amplification_is_refused(changes: dict[str, str | None], what: str) -> None:
    found = refused(**(SAMPLED | changes))
    assert any(what in one.what for one in found), found
    assert all(one.why and one.hint for one in found)


@pytest.mark.parametrize(
    "key", ["sampling_rate = 0.1", "clip = 1.0", "budget = 8.0", "max_participations = 3", "delta = 1e-6"]
)
def test_a_key_of_privacy_without_a_mode_is_refused(key: str) -> None:
    found = RunPlan.parse(f'[run]\ntask = "t"\n[local]\nlr = 0.1\n[privacy]\n{key}').check(codecs)
    assert any("without a mode" in one.what for one in found)


@pytest.mark.parametrize(
    ("changes", "delta"),
    [
        ({}, 1e-5),
        ({"cohort__clients": "10000"}, 1e-5),
        ({"cohort__clients": "40000"}, 2.5e-6),
        ({"cohort__clients": "40000", "privacy__delta": "2e-5"}, 2e-5),
        ({"cohort__clients": "40000", "privacy__mode": None, "privacy__clip": None}, 1e-5),
        ({"cohort__clients": "40000", "privacy__mode": '"example"', "privacy__records": "1000"}, 1e-5),
        ({"privacy__mode": '"example"', "privacy__records": "100000"}, 1e-6),
    ],
)
def test_a_delta_that_is_left_out_is_at_most_a_tenth_of_one_over_clients_or_records(
    changes: dict[str, str | None], delta: float
) -> None:
    made = plan(**{"privacy__delta": None} | changes)
    assert made.privacy.delta == delta
    assert RunPlan.from_json(made.to_json()) == made


@pytest.mark.parametrize("digits", [20, 400])
def test_more_clients_than_64_bits_can_count_are_refused_before_a_delta_is_computed_from_them(digits: int) -> None:
    """An integer of 400 digits is no float: comparing it with the delta raised OverflowError in who read the plan."""
    for mode in ('"central"', '"off"'):
        with pytest.raises(PlanError, match="clients = 9999"):
            plan(privacy__mode=mode, privacy__delta=None, cohort__clients="9" * digits)


def test_the_plan_check_follows_the_table_of_codecs_in_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "explain" / "differential-privacy.md"
    rows = [line.strip("| \n").split(" | ") for line in page.read_text().splitlines() if line.startswith("| central |")]
    seen = set[str]()
    for _, specs, allowed, _ in rows:
        for spec in re.findall(r"`([^`]+)`", specs):
            found = refused(uplink__codec=f"'{spec}'")
            assert bool(found) == (allowed == "no"), (spec, found)
            seen.add(allowed)
    assert seen == {"yes", "no"}
    assert "| local, example | any chain, `topk(0.04) > sign > rice` among them | yes |" in page.read_text()
    coded = {"uplink__codec": "'topk(0.04) > sign > rice'"}
    assert not refused(**(EXAMPLES | coded))
    assert not refused(**LOCAL, **coded, uplink__feedback='"none"')
    assert refused(**LOCAL, uplink__codec="'powersgd(4)'", uplink__feedback='"none"')


@pytest.mark.parametrize("spec", SPECS)
def test_an_allowed_codec_makes_as_many_bytes_of_any_update(spec: str) -> None:
    """One that is refused makes more bytes of one update than of another, but where topk sends everything."""
    rng, bound, sizes = np.random.default_rng(1), parse(spec).bind(layout_of(20_000, spec)), set[tuple[int, ...]]()
    size = bound.layout.segments[0].span.stop
    plain = rng.standard_normal(size)
    steep, level = plain * np.exp(3 * rng.standard_normal(size)), np.repeat(plain[: size // 100 + 1], 100)[:size]
    for values in (plain, steep, level):
        x: Vector = values.astype(np.float32)
        sizes.add((len(bound.encode(x, bound.init(0), Key(1, 2), 0).payload),))
    try:
        codecs.require_fixed_size(spec)
    except CodecError:
        assert len(sizes) > 1 or spec == "topk(1)"
    else:
        assert len(sizes) == 1
