"""Each value of a plan has a bound: no number overflows in a check, and no text makes a device or the API busy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from thinwire.aggregation import codecs
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.plan_schema import Sections
from thinwire.core.plan_text import MAX_LETTERS

TWO_LINES: dict[str, dict[str, Any]] = {"run": {"task": "digits"}, "local": {"lr": 0.5}}
PROTECTED: list[dict[str, dict[str, Any]]] = [
    {},
    {"cohort": {"clients": 5}, "secure": {"enabled": True}},
    {"cohort": {"clients": 5}, "privacy": {"mode": "central", "clip": 1.0, "noise_multiplier": 1.0}},
]
EXTREME = (float("inf"), float("-inf"), float("nan"), 1e308, 2**60, 5e-324, 10**400)
INNER = {"run.target": "value", "cohort.requires": "memory_gb", "local.overlap": "max_delay", "uplink.warmup": "rounds"}


def with_key(place: str, value: Any, base: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    section, key = place.split(".")
    made = {**TWO_LINES, **(base or {})}
    return {**made, section: {**made.get(section, {}), key: value}}


def numeric(model: type[BaseModel]) -> Iterator[str]:
    """The keys that take a number, by their schema."""
    for section, table in model.model_fields.items():
        for key, field in getattr(table.annotation, "model_fields", {}).items():
            if "int" in str(field.annotation) or "float" in str(field.annotation):
                yield f"{section}.{key}"


def extremes() -> Iterator[tuple[str, Any]]:
    for value in EXTREME:
        yield from ((place, value) for place in numeric(Sections))
        yield from ((place, {key: value}) for place, key in INNER.items())
        yield from [("uplink.warmup", {"rounds": 2, "ratios": [value]}), ("secure.metrics", {"loss": value})]


@pytest.mark.parametrize("base", PROTECTED, ids=["plain", "secure", "central"])
def test_no_number_in_a_plan_breaks_its_check(base: dict[str, dict[str, Any]]) -> None:
    read, refused = 0, 0
    for place, value in extremes():
        try:
            plan = RunPlan.from_json(with_key(place, value, base))
        except PlanError:
            refused += 1
            continue
        read += 1
        assert value == value and abs(value if isinstance(value, (int, float)) else 0) <= 2**60, place
        plan.check(codecs)
    assert read > 30
    assert refused > 200


@pytest.mark.parametrize(
    "place", ["run.metric", "run.keep", "cohort.wait_for", "local.personal_layers", "secure.histograms"]
)
def test_a_name_or_a_glob_has_at_most_256_letters(place: str) -> None:
    def given(letters: int) -> Any:
        name = "*a" * (letters // 2)
        return name if place in ("run.metric", "run.keep") else [name]

    RunPlan.from_json(with_key(place, given(256)))
    with pytest.raises(PlanError) as refused:
        RunPlan.from_json(with_key(place, given(258)))
    assert f"{place.split('.')[1]} = " in refused.value.what
    assert "it should be of at most 256 characters" in refused.value.why
    assert f"thinwire plan keys {place.split('.', maxsplit=1)[0]}" in refused.value.hint


@pytest.mark.parametrize("place", ["run.target", "secure.metrics", "uplink.layers"])
def test_a_name_within_a_table_has_a_bound_too(place: str) -> None:
    long = "n" * 257
    value = {"run.target": {"metric": long, "value": 1}, "secure.metrics": {long: 1.0}, "uplink.layers": {long: "fp16"}}
    with pytest.raises(PlanError, match="is not valid") as refused:
        RunPlan.from_json(with_key(place, value[place]))
    assert len(refused.value.what) < 600


def test_personal_layers_are_at_most_1024_globs() -> None:
    RunPlan.from_json(with_key("local.personal_layers", ["head.*"] * 1024))
    with pytest.raises(PlanError, match="personal_layers") as refused:
        RunPlan.from_json(with_key("local.personal_layers", ["head.*"] * 1025))
    assert "at most 1024 items" in refused.value.why


def test_the_letters_of_a_plan_are_bounded_in_all() -> None:
    names = ["n" * 256] * (MAX_LETTERS // 256)
    with pytest.raises(PlanError, match="holds more than 1,048,576 letters") as refused:
        RunPlan.from_json(with_key("cohort.wait_for", names))
    assert (refused.value.why, refused.value.hint) == (
        "1,048,576 are read",
        "shorter names, globs and codecs, or fewer of them",
    )
    RunPlan.from_json(with_key("cohort.wait_for", names[1:]))
    with pytest.raises(PlanError, match="letters"):
        RunPlan.from_json({**TWO_LINES, "k" * MAX_LETTERS: 1})


@pytest.mark.parametrize("raw", [with_key("run.metric", "\ud800"), {**TWO_LINES, "\udfff": {"a": 1}}])
def test_text_that_is_not_utf_8_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="text that is not UTF-8") as refused:
        RunPlan.from_json(raw)
    assert "half of a character" in refused.value.why


def test_rules_by_layer_are_refused_before_any_codec_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {f"a{number}": "topk(0.01) > int8" for number in range(150)}
    assert RunPlan.from_json(with_key("uplink.layers", rules)).check(codecs) == []
    inner = "layers(" + "; ".join(f"a{number}=topk(0.{number + 1:04d}) > int8" for number in range(140)) + "; *=int8)"

    def parsed(spec: str) -> Any:
        raise AssertionError(f"{spec} was parsed")

    monkeypatch.setattr(codecs, "parse", parsed)
    for layers, why in (
        ({**rules, "b" * 256: "topk(0.01) > int8", "c" * 256: "fp16"}, "4096 letters of one are read"),
        ({"a": inner}, "rules by layer stand in one place"),
        ({"a": " layers (*=fp16)"}, "rules by layer stand in one place"),
    ):
        with pytest.raises(PlanError, match=r"\[uplink\] layers") as refused:
            RunPlan.from_json(with_key("uplink.layers", layers), codecs=codecs)
        assert why in refused.value.why
