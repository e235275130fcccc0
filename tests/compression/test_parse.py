"""From a spec to a codec, and what is refused with a sentence."""

from __future__ import annotations

import itertools

import pytest

from thinwire.aggregation import codecs
from thinwire.compression import Contractive, NoGuarantee, Unbiased, feedback, parse, with_layers
from thinwire.compression.base import chained
from thinwire.core import Layout
from thinwire.core.errors import CodecError


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("identity", "identity"),
        ("zstd", "identity > zstd"),
        ("topk(1e-2)>identity", "topk(0.01)"),
        (" topk( 0.0100 ) >int8> delta > pack >zstd ", "topk(0.01) > int8 > zstd"),
        ("layers(*.bias = fp16;*=int8)", 'layers("*.bias"=fp16; *=int8)'),
        ("layers ('*.bias' = fp16; *=int8)", 'layers("*.bias"=fp16; *=int8)'),
    ],
)
def test_a_spec_has_one_canonical_form(written: str, canonical: str) -> None:
    assert parse(written).spec == canonical
    assert parse(canonical) == parse(written)


@pytest.mark.parametrize(
    ("spec", "what", "hint"),
    [
        ("topq(0.1)", "no codec 'topq'", "topk"),
        ("", "cannot read ''", "topk(0.01) > int8 > zstd"),
        ("topk", "topk() has no ratio", "topk(0.01)"),
        ("topk(x)", "topk(x) has no ratio", "topk(0.01)"),
        ("topk(2)", "topk(2) is not valid", "topk(0.02)"),
        ("topk(1e-400)", "topk(1e-400) is not valid", "topk(0.01)"),
        ("gzip", "no codec 'gzip'", "one of these"),
        ("rotate", "no codec 'rotate'", "one of these"),
        ("TOPK(0.1)", "no codec 'TOPK'", "topk"),
        ("signsgd(3)", "signsgd takes no argument", "signsgd"),
        ("int8 > layers(*=int8)", "layers within a chain", 'layers("*.bias"=fp16; *=topk(0.01) > int8)'),
        ("topk(0)", "topk(0) is not valid", "topk(0.01)"),
        ("topk(-0.1)", "topk(-0.1) is not valid", "topk(0.01)"),
        ("topk(nan)", "topk(nan) is not valid", "topk(0.01)"),
        ("topk(inf)", "topk(inf) is not valid", "topk(0.01)"),
        ("int8(3)", "int8 takes no argument", "int8"),
        ("int8 > topk(0.1)", "no sensible order", "topk(0.1) > int8"),
        ("int8 > fp16", "no sensible order", "int8"),
        ("topk(0.1) > topk(0.2)", "no sensible order", "topk(0.1)"),
        ("zstd > int8", "no sensible order", "int8 > zstd"),
        ("int8 > zstd > pack", "no sensible order", "int8 > zstd"),
        ("int8 > zstd > zstd", "no sensible order", "int8 > zstd"),
        ("int8 > delta", "has nothing to code", "int8"),
        ("int8 >", "cannot read ''", "topk(0.01) > int8 > zstd"),
        ("layers(*.bias=fp16)", "the last rule must be for *", "; *=topk(0.01) > int8"),
        ("layers(*=fp16; *=int8)", "two rules for *", "leave one of them out"),
        ("layers()", "cannot read the rule", 'layers("*.bias"=fp16; *=topk(0.01) > int8)'),
        ("layers(*=layers(*=int8))", "cannot read the rule", 'layers("*.bias"=fp16; *=topk(0.01) > int8)'),
        ("x" * 5000, "a codec of 5000 characters", ""),
    ],
)
def test_a_spec_that_cannot_be_is_refused_with_what_would_do(spec: str, what: str, hint: str) -> None:
    with pytest.raises(CodecError) as refused:
        codecs.parse(spec)
    assert what in refused.value.what
    assert refused.value.hint == hint


def test_a_plans_rules_become_one_spec() -> None:
    assert with_layers("topk(0.010) > int8", {}) == "topk(0.01) > int8"
    spec = with_layers("topk(0.01) > int8", {"*.bias": "fp16", "head.*": "identity"})
    assert spec == 'layers("*.bias"=fp16; "head.*"=identity; *=topk(0.01) > int8)'


def test_the_kind_of_a_chain_follows_from_its_steps() -> None:
    assert chained(Contractive(0.5), Unbiased(0.5)) == Contractive(0.25)
    assert chained(Contractive(0.5), Contractive(0.5)) == Contractive(0.25)
    assert chained(Unbiased(0), Unbiased(0.5)) == Unbiased(0.5)
    assert chained(NoGuarantee(), Contractive(0.5)) == NoGuarantee()
    worse = chained(Contractive(0.5), Unbiased(3.0))
    assert isinstance(worse, Contractive)
    assert worse.delta <= 0
    layered = parse('layers("a"=int8; *=topk(0.1))').bind(Layout.of({"a": (9,), "b": (9,)}))
    assert layered.kind == Contractive(0.1)


def test_feedback_stands_around_what_contracts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    codecs.require_contraction("topk(0.01) > int8 > zstd")
    codecs.require_contraction("identity")
    monkeypatch.setattr("thinwire.compression.codecs.int8_qsgd_natural.Int8.kind", lambda self: Contractive(0.0))
    for spec in ("int8", "topk(0.5) > int8", "layers(a=int8; *=fp16)"):
        with pytest.raises(CodecError, match="would diverge"):
            feedback(parse(spec)).bind(Layout.of({"a": (8,), "b": (8,)}))


@pytest.mark.parametrize(
    ("alias", "stands_for"),
    [
        ("stc(0.01)", "topk(0.01) > sign > rice"),
        ("stc(0.04) > zstd", "topk(0.04) > sign > rice > zstd"),
        ("fedpaq(4)", "qsgd(4)"),
        ("signsgd", "sign(scaled)"),
    ],
)
def test_an_alias_is_what_it_stands_for(alias: str, stands_for: str) -> None:
    assert parse(alias).spec == stands_for == parse(stands_for).spec


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("int8 > topk(0.1)", "topk(0.1) > int8"),
        ("qsgd(1)", "qsgd(2)"),
        ("qsgd(9)", "qsgd(8)"),
        ("qsgd(4, l3)", "qsgd(4, l2)"),
        ("eden(5)", "eden(4)"),
        ("sign(x)", "sign(scaled)"),
        ("qsgd(1, l2)", "qsgd(2, l2)"),
        ("sign()", "sign"),
        ("twobit(3)", "twobit(2)"),
        ("threshold(2000)", "threshold(1000)"),
        ("threshold(nan)", "threshold(2.5)"),
        ("identity > int8", "int8"),
        ("int8 > powersgd(4)", "powersgd(4) > fp16"),
        ("rice > fp16", "fp16"),
        ("threshold", "threshold(2.5)"),
        ("fp16 > rice", "fp16"),
        ("randk(0.1) > fp16 > rice", "randk(0.1) > fp16"),
        ("topk(0.1) > delta > rice", "topk(0.1) > rice"),
        ("topk(0.1) > delta > rans", "topk(0.1) > rans"),
        ("topk(0.1) > rice > rans", "topk(0.1) > rans"),
        ("fp16 > rans", "fp16"),
        ("randk(0.1) > delta", "randk(0.1)"),
    ],
)
def test_a_senseless_chain_is_answered_with_the_nearest_valid_one(spec: str, hint: str) -> None:
    with pytest.raises(CodecError) as refused:
        codecs.parse(spec)
    assert refused.value.hint == hint
    assert codecs.parse(hint).spec == hint


@pytest.mark.parametrize(
    ("spec", "stands_for", "hint"),
    [
        ("stc", "topk(_) > sign > rice", "stc(0.01)"),
        ("stc(4)", "topk(_) > sign > rice", "stc(0.04)"),
        ("dgc(x)", "topk(_)", "dgc(0.01)"),
        ("fedpaq(1) > zstd", "qsgd(_)", "fedpaq(2)"),
    ],
)
def test_an_alias_that_cannot_be_is_refused_by_its_own_name(spec: str, stands_for: str, hint: str) -> None:
    with pytest.raises(CodecError) as refused:
        codecs.parse(spec)
    assert refused.value.what == f"{spec.removesuffix(' > zstd')} is not valid"
    assert f"it stands for {stands_for}: " in refused.value.why
    assert refused.value.hint == hint
    codecs.parse(hint)


STEPS = (
    "identity", "fp16", "qsgd(4)", "sign", "topk(0.1)", "randk(0.1)", "powersgd(4)", "pack", "delta", "rice", "rans",
    "zstd", "stc(0.1)", "signsgd",
)  # fmt: skip


@pytest.mark.parametrize("first", STEPS)
def test_every_chain_of_three_steps_is_canonical_or_refused_with_one_that_is(first: str) -> None:
    for rest in itertools.chain.from_iterable(itertools.product(STEPS, repeat=n) for n in (0, 1, 2)):
        spec = " > ".join((first, *rest))
        try:
            assert parse(parse(spec).spec) == parse(spec)
        except CodecError as refused:
            assert refused.why, spec
            assert parse(refused.hint).spec == refused.hint, spec


@pytest.mark.parametrize(("spec", "layers"), [("layers(*=int8)", {"a": "fp16"}), ("int8", {"a": "layers(*=fp16)"})])
def test_rules_by_layer_stand_in_no_other_rules(spec: str, layers: dict[str, str]) -> None:
    with pytest.raises(CodecError, match="within rules by layer"):
        with_layers(spec, layers)
