"""`thinwire codecs`: every name with what it is, and one chain measured here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint

import pytest

from thinwire.aggregation import codecs
from thinwire.compression.base import Quantizer
from thinwire.compression.catalog import described, steps
from thinwire.compression.chain import PLAIN
from thinwire.compression.codecs.identity_fp16_bf16 import Fp16
from thinwire.compression.spec import ALIASES
from thinwire.core import RunPlan
from thinwire.core.plan_schema import DGC, IDENTITY


def test_every_name_is_listed_with_its_role_kind_and_bits(thinwire):
    rows = {row["name"]: row for row in thinwire("codecs", "--json").document}
    assert set(rows) == set(codecs) | set(ALIASES)
    assert IDENTITY == PLAIN in rows
    assert rows[DGC]["role"] == "alias"
    assert all(row["role"] in ("quantizer", "sparsifier", "lowrank", "coder", "alias") for row in rows.values())
    assert rows["int8"]["kind"].startswith("unbiased, omega 0.06")
    assert rows["topk"]["kind"] == "contractive, delta 0.01"
    assert rows["twobit"]["kind"] == "residual only"
    assert 8 <= rows["int8"]["bits"] < 8.1
    assert rows["stc"]["stands_for"] == "topk(_) > sign > rice"
    assert thinwire("codecs", "list", "--json").document == list(rows.values())


def test_every_method_names_its_paper(thinwire):
    casts = {"identity", "fp16", "bf16", "pack", "delta"}
    for row in thinwire("codecs", "--json").document:
        assert row["paper"] or row["name"] in casts, row["name"]


def test_the_list_is_read_by_a_person(thinwire):
    said = thinwire("codecs")
    assert said.code == 0
    assert "Seide et al. 2014" in said.out
    assert len(said.out.splitlines()) == len(codecs) + len(ALIASES) + 1


def test_the_list_says_with_which_to_begin(thinwire):
    first = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 1').uplink.codec
    assert f"to begin with: {first}, " in thinwire("codecs").err
    assert f'thinwire codecs try "{first}"' in thinwire("codecs").err


def test_one_chain_is_measured_without_feedback_and_with_it(thinwire):
    found = thinwire("codecs", "try", "topk(0.01)>int8 > rice", "--params", "70000", "--json").document
    assert (found["spec"], found["params"]) == ("topk(0.01) > int8 > rice", 70000)
    assert [trial["feedback"] for trial in found["trials"]] == [False, True]
    for trial in found["trials"]:
        assert 0.15 < trial["bits_per_param"] < 0.2
        assert 0.9 < trial["relative_error"] < 1
        assert min(trial["encode_ms"], trial["decode_ms"], trial["memcpy_ms"]) > 0
    assert "70000 parameters" in thinwire("codecs", "try", "int8", "--params", "70000").out


def test_a_low_rank_is_measured_on_a_matrix(thinwire):
    (trial, _) = thinwire("codecs", "try", "powersgd(4)", "--params", "50000", "--json").document["trials"]
    assert trial["bits_per_param"] < 1.5
    assert trial["relative_error"] > 0.5


def test_an_alias_is_said_to_be_measured_as_the_chain_that_it_stands_for(thinwire):
    said = thinwire("codecs", "try", "dgc(0.01) > int8", "--params", "1000")
    assert "dgc is measured as topk(_): deep gradient compression" in said.out
    assert "else top-k" in said.out
    assert "is measured as" not in thinwire("codecs", "try", "topk(0.01)", "--params", "1000").out
    assert list(thinwire("codecs", "try", "stc(0.01)", "--params", "1000", "--json").document["aliases"]) == ["stc"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("int8 > topk(0.1)",), 3, "try:   topk(0.1) > int8"),
        (("int9",), 3, "try:   int8\n"),
        (("topkk",), 3, "try:   topk\n"),
        (("int8", "--params", "0"), 2, "are not tried"),
        (("int8", "--params", "9999999999"), 2, "200000000"),
    ],
)
def test_what_are_too_many_to_try_is_refused_with_what_can(thinwire, words, code, said):
    answer = thinwire("codecs", "try", *words)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err


@dataclass(frozen=True)
class Boom(Fp16):
    """What somebody has not got to run yet."""

    examples = ("boom",)
    spec = "boom"

    def scales_count(self, size):
        raise RuntimeError("not yet")


def test_what_the_code_of_another_package_raises_is_not_called_ours(thinwire, monkeypatch):
    entry = EntryPoint("boom", f"{__name__}:Boom", "thinwire.codecs")
    monkeypatch.setattr(steps, "_installed", {"boom": entry})
    monkeypatch.setattr(steps, "_named", dict(steps._named))
    answer = thinwire("codecs", "try", "boom", "--params", 100)
    assert answer.code == 3
    assert "error: the codec 'boom' of tests raised RuntimeError: not yet" in answer.err
    assert "test_codecs.py:" in answer.err
    assert f"pytest --thinwire-codec {__name__}:Boom" in answer.err
    assert "defect of Thinwire" not in answer.err


def test_what_our_own_code_raises_is_called_ours_though_another_package_is_there(thinwire, monkeypatch):
    monkeypatch.setattr(steps, "_installed", {"boom": EntryPoint("boom", f"{__name__}:Boom", "thinwire.codecs")})
    monkeypatch.setattr("thinwire.compression.catalog.trials", partial(int, "not a number"))
    answer = thinwire("codecs", "try", "int8")
    assert answer.code == 1
    assert "a defect of Thinwire: TypeError" in answer.err


@dataclass(frozen=True)
class Astray(Fp16):
    examples = ("astray > nowhere",)


class Half(Quantizer):
    examples, spec = ("half",), "half"


def test_what_another_package_brings_and_does_not_hold_hides_nothing_else(monkeypatch):
    ours = {row.name: row for row in described()}
    found = {name: EntryPoint(name, f"{__name__}:{at}", "thinwire.codecs")
             for name, at in (("boom", "Boom"), ("astray", "Astray"), ("half", "Half"), ("gone", "Gone"))}  # fmt: skip
    monkeypatch.setattr(steps, "_installed", found)
    monkeypatch.setattr(steps, "_named", dict(steps._named))
    rows = {row.name: row for row in described()}
    broken = {name: rows.pop(name) for name in found}
    assert rows == ours
    assert {row.role for row in broken.values()} == {"broken"}
    assert broken["boom"].what == "RuntimeError: not yet"
    assert "no codec 'nowhere'" in broken["astray"].what
    assert "has no bits, check, dequantize, kind, quantize" in broken["half"].what
    assert "does not import" in broken["gone"].what
