"""A plan of the API names no code and no file that `aggregator.toml` does not allow, whichever key leads to it."""

from __future__ import annotations

import time
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from thinwire.aggregation import codecs
from thinwire.core.errors import PlanError
from thinwire.core.plan import RunPlan
from thinwire.core.plan_names import (
    CODECS,
    HARMLESS,
    NAMING,
    OPTIMIZERS,
    is_allowed,
    named_in,
    refused_names,
    upload_id,
)
from thinwire.core.plan_text import plan_keys

OWN = codecs.own_names()
OTHERS = {(CODECS, "evil"): "evil.codecs:Evil", (OPTIMIZERS, "evilopt"): "evil.optimizers:Opt"}  # installed packages
NAMED: dict[str, list[Any]] = {  # every key that leads to code or to a file -> values that do, in each notation
    "run.init": ["/etc/model.safetensors", "model.safetensors", "../model.safetensors", "~/model.safetensors"],
    "uplink.codec": ["evil", "evil(1)", "topk(0.1) > evil", "topk(0.1)>evil>zstd", 'layers("*.b"=fp16; *=evil)',
                     "layers(a=evil; *=fp16)", "layers(\"a'\"=evil; \"b'\"=fp16)", " evil ", "a.b:C", "/x/y.so"],
    "uplink.layers": [{"*.bias": "evil"}, {"*.bias": "fp16", "*.w": "evil(2) > zstd"}],
    "uplink.ladder": [["fp16", "evil"], ["evil", "int8"]],
    "downlink.codec": ["evil", "int8 > evil"],
    "server.optimizer": ["evilopt", "evil.optimizers:Opt", "/x/y.py:Opt", "y.py:Opt", "object:Opt"],
    "server.reduce": ["a.b:C", "/x/y.py", "a.b:C(1, 2)", " /x/y.py:C (0.1)", "y.py:C", "object:C"],
}  # fmt: skip


def holds_text(annotation: object) -> bool:
    """Whether a value of this type may be a text that a person makes up."""
    if annotation is str:
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return any(holds_text(field.annotation) for field in annotation.model_fields.values())
    if typing.get_origin(annotation) is typing.Literal:
        return False
    return any(holds_text(inner) for inner in typing.get_args(annotation))


def plan_with(key: str, value: Any) -> RunPlan:
    section, name = key.split(".")
    raw: dict[str, dict[str, Any]] = {"run": {"task": "digits"}, "local": {"lr": 0.5}}
    raw.setdefault(section, {})[name] = value
    return RunPlan.from_json(raw)


def test_every_key_that_holds_text_is_known_to_name_something_or_to_be_harmless() -> None:
    texts = {f"{section}.{name}" for section, name, field in plan_keys() if holds_text(field.annotation)}
    assert texts == {*NAMING, *HARMLESS}
    assert NAMED.keys() == {*NAMING}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NAMED.items() for value in values])
def test_what_is_not_allowed_is_refused_at_its_key_without_an_import(key: str, value: Any) -> None:
    plan = plan_with(key, value)
    [*found] = refused_names(plan, OWN, [], OTHERS)
    assert found
    assert {".".join(one.place) for one in found} == {key}
    assert all(one.what and one.why and one.hint for one in found)
    assert refused_names(plan, OWN, ["*"], OTHERS) == [] or not is_allowed(str(value), ["*"])


@pytest.mark.parametrize("value", ["", "device", "run:digits-1", "run:digits-1@best", "upload:0a1b"])
def test_a_model_that_the_aggregator_holds_is_no_path(value: str) -> None:
    assert named_in(plan_with("run.init", value), OWN) == []


def seconds_of(spec: str) -> float:
    began = time.perf_counter()
    named_in(plan_with("uplink.ladder", [spec] * 16), OWN)
    return time.perf_counter() - began


@pytest.mark.parametrize("letter", ["1", "a", "'", "''a", "(", " ", "=", ";"])
def test_names_in_the_longest_specs_are_found_in_linear_time(letter: str) -> None:
    assert min(seconds_of((letter * 4096)[:4096]) for _ in range(3)) < 0.5


@pytest.mark.parametrize("key", [*NAMED])
def test_a_name_or_a_spec_that_is_too_long_is_no_value(key: str) -> None:
    long: dict[str, Any] = {"uplink.layers": {"*": "1" * 4097}, "uplink.ladder": ["1" * 4097, "fp16"]}
    with pytest.raises(PlanError, match="is not valid"):
        plan_with(key, long.get(key, "1" * 4097))


def test_mean_is_a_way_to_reduce_and_no_optimizer() -> None:
    assert named_in(plan_with("server.reduce", "mean"), OWN) == []
    assert [one.key for one in named_in(plan_with("server.optimizer", "mean"), OWN)] == ["optimizer"]
    for spec in ("median", "krum(1)", "multi-krum(1, 2)"):
        assert named_in(plan_with("server.reduce", spec), OWN) == []
    assert refused_names(plan_with("server.reduce", "a.b:C(1)"), OWN, ["a.b:C"], {}) == []


@pytest.mark.parametrize("init", ["upload:" + "a" * 33, "upload:", "upload:x.y", "upload:../0a", "upload:0a\n"])
def test_an_upload_has_an_id_of_hexadecimal_digits(init: str) -> None:
    assert upload_id(init) == ""
    assert upload_id("upload:" + "0a" * 16) == "0a" * 16


@pytest.mark.parametrize(
    "spec", ["topk(0.01) > int8 > zstd", 'layers("a/b:c"=fp16; *=eden(1))', "stc(0.01)", "qsgd(4, l2)"]
)
def test_our_own_codecs_need_no_permission(spec: str) -> None:
    assert refused_names(plan_with("uplink.codec", spec), OWN, [], {**OTHERS, (CODECS, "eden"): "evil:Eden"}) == []


def test_a_codec_and_an_optimizer_of_one_name_are_two_pieces_of_code() -> None:
    others = {(CODECS, "twin"): "good:Codec", (OPTIMIZERS, "twin"): "evil:Opt", (OPTIMIZERS, "int8"): "evil:Int8"}
    assert refused_names(plan_with("uplink.codec", "twin"), OWN, ["good:Codec"], others) == []
    for name in ("twin", "int8"):
        (found,) = refused_names(plan_with("server.optimizer", name), OWN, ["good:Codec"], others)
        assert "evil:" in found.why


def test_an_allowed_package_is_named_by_its_class_or_by_its_name() -> None:
    plan = plan_with("uplink.codec", "evil > zstd")
    assert refused_names(plan, OWN, ["evil.codecs:Evil"], OTHERS) == []
    assert refused_names(plan, OWN, ["evil"], OTHERS) == []
    assert refused_names(plan, OWN, ["evil.codecs:Other"], OTHERS) != []


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/models/a.safetensors", True),
        ("/models/deep/a.safetensors", True),
        ("/models/../etc/passwd", False),
        ("/models/./a.safetensors", False),
        ("//models/a.safetensors", False),
        ("models/a.safetensors", False),
        ("/models", False),
    ],
)
def test_a_path_is_absolute_and_has_no_dots(path: str, allowed: bool) -> None:
    assert is_allowed(path, ["/models/*"]) == allowed
