"""A rule by layer that is for no tensor is refused as soon as the model is known, and says what there is."""

from __future__ import annotations

import pytest

from thinwire.aggregation.plan_codecs import require_rules
from thinwire.core import Layout, RunPlan
from thinwire.core.errors import CodecError
from thinwire.core.layout import Tensor

LAYOUT = Layout.build(
    [Tensor("fc1.weight", (4, 3)), Tensor("fc1.bias", (4,)), Tensor("norm.running_mean", (4,), role="buffer")]
)


def plan(more: str) -> RunPlan:
    return RunPlan.parse(f'[run]\ntask = "d"\n[local]\nlr = 1\n{more}')


@pytest.mark.parametrize(
    "more",
    [
        "",
        "[uplink.layers]\n'*.bias' = 'fp16'",
        "[uplink.layers]\n'*.bias' = 'fp16'\n'*.weight' = 'int8'",
        "[uplink]\ncodec = 'layers(fc1.bias=fp16; *=int8)'",
        "[downlink]\ncodec = 'layers(*.bias=fp16; *=int8)'",
    ],
)
def test_rules_that_decide_something_may_stand(more: str) -> None:
    require_rules(plan(more), LAYOUT)


@pytest.mark.parametrize(
    ("more", "what", "why"),
    [
        ("[uplink.layers]\n'*.bais' = 'fp16'", '[uplink] the rule "*.bais"=fp16', "there are fc1.weight, fc1.bias"),
        ("[uplink]\ncodec = 'layers(conv.*=fp16; *=int8)'", '"conv.*"=fp16 is for nothing', "called like that"),
        ("[uplink]\nladder = ['fp16', 'int8']\nlayers = {head = 'bf16'}", '"head"=bf16 is for nothing', "called"),
        ("[downlink]\ncodec = 'layers(x=fp16; *=int8)'", '[downlink] the rule "x"=fp16', "called like that"),
        ("[uplink.layers]\n'*.running_mean' = 'fp16'", "is for nothing", "no trained tensor"),
        ("[uplink]\ncodec = 'layers(fc*=fp16; *.bias=bf16; *=int8)'", '"*.bias"=bf16', "before it decide for fc1.bias"),
    ],
)
def test_a_rule_that_is_for_nothing_is_refused_with_the_names_that_there_are(more: str, what: str, why: str) -> None:
    with pytest.raises(CodecError) as error:
        require_rules(plan(more), LAYOUT)
    assert what in error.value.what
    assert why in error.value.why
    assert error.value.hint


def test_a_name_that_is_near_is_named() -> None:
    with pytest.raises(CodecError) as error:
        require_rules(plan("[uplink.layers]\n'fc1.bais' = 'fp16'"), LAYOUT)
    assert error.value.hint == "a pattern for fc1.bias, or leave the rule out"
