"""Warm-up and dgc: each round assignments in a codec of its own, and a late answer is read by that of its
assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import pytest

from tests.support.server_bench import Bench, scripted
from thinwire.aggregation import codecs
from thinwire.aggregation.plan_codecs import codec_of, encoder, less_compressed
from thinwire.compression.base import Contractive, ErrorBound, Indices, Sparsifier
from thinwire.compression.codecs import registry
from thinwire.core import Key, Layout, RunPlan
from thinwire.core.errors import CodecError
from thinwire.core.events import UpdateAccepted, UpdateDropped
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.types import Vector
from thinwire.simulation import Behavior

DGC = '[run]\ntask = "d"\n[local]\nlr = 1\nsteps = {}\n{}\n[uplink]\ncodec = "{}"\n'
WARM = {"rounds": 2, "ratios": [0.5, 0.25]}


def test_each_round_assignments_in_its_own_codec_and_then_in_the_plans(tmp_path):
    uplink = {"codec": "topk(0.1) > int8", "warmup": WARM}
    bench = Bench(tmp_path, [scripted("a")], run={"rounds": 3}, uplink=uplink)
    assert bench.drive().status == "done"
    assert [assignment.codec for assignment in bench.assignments("a")] == [
        "topk(0.5) > int8",
        "topk(0.25) > int8",
        "topk(0.1) > int8",
    ]


def test_an_answer_that_comes_in_the_next_round_is_read_by_its_own_codec(tmp_path):
    late = scripted("b", lambda assignment: Behavior(compute_s=15.0 if assignment.round == 1 else 1.0))
    other = scripted("a", lambda assignment: Behavior(compute_s=1.0 if assignment.round == 1 else 9.0))
    bench = Bench(
        tmp_path, [other, late], run={"rounds": 3}, cohort={"deadline_s": 10, "min_updates": 1},
        uplink={"codec": "topk(0.1) > int8", "warmup": WARM},
    )  # fmt: skip
    assert bench.drive().status == "done"
    assert [event.assignment_round for event in bench.events(UpdateAccepted) if event.late] == [1]
    assert bench.events(UpdateDropped) == []


def test_a_warm_up_is_never_sparser_than_the_plan():
    assert less_compressed("topk(0.3) > int8", Decimal("0.1")) == "topk(0.3) > int8"
    assert less_compressed('layers("b"=fp16; *=topk(0.01))', Decimal("0.1")) == 'layers("b"=fp16; *=topk(0.1))'
    with pytest.raises(CodecError, match="warm-up"):
        codec_of(UplinkSection(codec="int8", warmup=WARM), 0)


@dataclass(frozen=True)
class Head(Sparsifier):
    """A sparsifier of another package, which sends the first values."""

    examples = ("head(0.01)",)
    part: Decimal

    @classmethod
    def read(cls, argument: str | None) -> Head:
        return cls(Decimal(argument or "1"))

    @property
    def spec(self) -> str:
        return f"head({self.part})"

    def kind(self) -> ErrorBound:
        return Contractive(float(self.part))

    def count(self, size: int) -> int:
        return int(self.part * size)

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        return np.arange(self.count(values.size)), values[: self.count(values.size)].copy()

    def with_ratio(self, least: Decimal) -> Head:
        return replace(self, part=max(self.part, least))


def test_a_sparsifier_of_another_package_is_warmed_up_because_its_class_has_a_ratio(monkeypatch):
    monkeypatch.setitem(registry()._named, "head", Head)
    assert less_compressed("head(0.01) > int8", Decimal("0.25")) == "head(0.25) > int8"


def test_dgc_is_topk_with_momentum_mask_and_the_papers_warm_up():
    uplink = UplinkSection(codec="dgc(0.001) > int8")
    assert [codec_of(uplink, n) for n in (0, 3, 4)] == ["topk(0.25) > int8", "topk(0.004) > int8", "topk(0.001) > int8"]
    codec = encoder("topk(0.25)", uplink, Layout.of({"w": (4,)}))
    state = codec.encode(np.array([4, 1, -3, 0.5], np.float32), codec.init(), Key(1)).state
    assert state["momentum"].tolist() == [0, 1, -3, 0.5]


def test_dgc_clips_each_devices_gradient_to_the_threshold_times_the_root_of_their_number(tmp_path):
    devices = [scripted(name) for name in "abcd"]
    local = {"lr": 1.0, "steps": 1, "clip_grad": 3.0}
    bench = Bench(
        tmp_path, devices, run={"rounds": 2}, local=local, uplink={"codec": "dgc(0.1)"}, cohort={"clients": 4}
    )
    assert bench.drive().status == "done"
    assert {e.assignment.work.clip for e in bench.fleet.sent if e.assignment.kind == "train"} == {6.0}
    plain = Bench(tmp_path / "plain", [scripted("a")], run={"rounds": 1}, local=local)
    plain.drive()
    assert {e.assignment.work.clip for e in plain.fleet.sent} == {0.0}, "the plan's own clip is the whole device's"


@pytest.mark.parametrize(
    ("steps", "more", "codec", "what"),
    [
        (5, "clip_grad = 1.0", "dgc(0.01)", "several local steps"),
        (1, "", "dgc(0.01)", "without a clip"),
    ],
)
def test_what_dgc_needs_is_said(steps, more, codec, what):
    assert any(what in refusal.what for refusal in RunPlan.parse(DGC.format(steps, more, codec)).check(codecs))


def test_a_warm_up_of_a_codec_without_a_ratio_is_refused():
    plan = RunPlan.parse('[run]\ntask="d"\n[local]\nlr=1\n[uplink]\ncodec="int8"\nwarmup={rounds=2,ratios=[0.5]}')
    assert [refusal.what for refusal in plan.check(codecs)] == ["a warm-up of 'int8'"]


def test_a_plan_with_dgc_holds():
    assert RunPlan.parse(DGC.format(1, "clip_grad = 1.0", "dgc(0.01) > int8")).check(codecs) == []


@pytest.mark.parametrize(
    ("uplink", "what"),
    [
        ("codec = 'layers(\"*.bias\"=fp16; *=dgc(0.01))'", "dgc in a rule by layer"),
        ("layers = { a = 'dgc (0.01)' }", "dgc in a rule by layer"),
        ("codec = 'int8'\n[downlink]\ncodec = 'dgc(0.01)'", "[downlink] codec = 'dgc(0.01)'"),
        ("codec = 'layers(*=int8)'\nlayers = { a = 'fp16' }", "rules by layer within rules by layer"),
    ],
)
def test_what_would_be_dgc_by_name_alone_and_rules_within_rules_are_refused_before_a_run(uplink, what):
    """The macro's other three parts are of the whole uplink: in a rule or in the downlink it would be plain top-k."""
    plan = RunPlan.parse(f"[run]\ntask = 't'\n[local]\nlr = 0.1\nsteps = 1\nclip_grad = 1.0\n[uplink]\n{uplink}")
    assert what in [refusal.what for refusal in plan.check(codecs)]


def test_a_codec_of_another_name_that_begins_alike_is_not_dgc():
    assert not UplinkSection(codec="dgcx(0.01)").dgc
    assert UplinkSection(codec=" dgc (0.01) > int8").dgc
