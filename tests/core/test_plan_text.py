"""The text of a stored plan stands for the same plan."""

from __future__ import annotations

import pytest

from thinwire.core import RunPlan
from thinwire.core.plan_text import plan_text, toml

PLANS = (
    '[run]\ntask = "digits"\n[local]\nlr = 0.5',
    (
        '[run]\ntask = "t"\ntarget = { metric = "loss", value = 0.1 }\nseed = 9007199254740993\n[local]\nlr = 1e-5\n'
        "overlap = { max_delay = 3 }"
    ),
    (
        '[run]\ntask = "t"\n[local]\nlr = 1\n[cohort]\nwait_for = ["a", "b"]\nclients = 0.25\nmin_updates = 1.0\n'
        "requires = { mains = true }"
    ),
    (
        '[run]\ntask = "t"\n[local]\nlr = 1\n[uplink]\ncodec = "topk(0.01) > int8"\nlayers = { "*.bias" = "fp16" }\n'
        "warmup = { rounds = 2, ratios = [0.5, 0.25] }"
    ),
    (
        '[run]\ntask = "t"\n[local]\nlr = 1\n[secure]\nenabled = true\nmetrics = { loss = 10.0 }\nrotate = 1024\n'
        '[privacy]\nmode = "distributed"\nclip = 1\nnoise_multiplier = 1\npopulation = "ward \\"3\\"\\n"'
    ),
    (  # left out, its delta would be 1 / (10 clients)
        '[run]\ntask = "t"\n[local]\nlr = 1\n[cohort]\nclients = 40000\n'
        '[privacy]\nmode = "central"\nclip = 1\nnoise_multiplier = 1\ndelta = 1e-5'
    ),
)


@pytest.mark.parametrize("text", PLANS)
def test_reading_the_text_gives_a_plan_of_the_same_digest(text: str):
    plan = RunPlan.parse(text)
    assert RunPlan.parse(plan_text(plan)).digest == plan.digest


def test_the_text_has_only_keys_that_differ_from_their_default():
    plan = RunPlan.parse('[run]\ntask = "digits"\nrounds = 20\nseed = 3\n[local]\nlr = 0.5\nbatch = 32')
    assert plan_text(plan) == '[run]\ntask = "digits"\nseed = 3\n\n[local]\nlr = 0.5\n'


def test_a_key_that_is_no_bare_word_is_in_quotes():
    assert toml({"*.bias": "fp16", "a-b_1": 1}) == '{ "*.bias" = "fp16", a-b_1 = 1 }'


def test_a_private_plan_leaves_out_the_delta_that_follows_from_its_clients() -> None:
    text = '[run]\ntask = "t"\n\n[cohort]\nclients = 40000\n\n[local]\nlr = 1.0\n\n[privacy]\nmode = "central"\n'
    assert plan_text(RunPlan.parse(text)) == text
