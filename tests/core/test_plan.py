"""The plan: two lines are enough, and everything wrong is named with why and what to try."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.aggregation import codecs
from thinwire.aggregation.plan_codecs import feedback_of
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.plan_rules import DeviceTimes

TWO_LINES = '[run]\ntask = "digits"\n[local]\nlr = 0.5\n'


def refusals(more: str) -> list[str]:
    return [refusal.what for refusal in RunPlan.parse(TWO_LINES + more).check(codecs)]


def test_two_lines_make_a_valid_plan() -> None:
    plan = RunPlan.parse(TWO_LINES)
    assert plan.check(codecs) == []
    assert (plan.run.rounds, plan.uplink.codec, plan.cohort.late) == (20, "eden(1)", "aggregate")


def test_a_resolved_plan_comes_back_with_its_digest() -> None:
    plan = RunPlan.parse(TWO_LINES + "[cohort]\nclients = 0.5\n[uplink.layers]\n'*.bias' = 'fp16'\n")
    assert RunPlan.from_json(plan.to_json()).digest == plan.digest
    assert RunPlan.parse(TWO_LINES).digest != plan.digest


def test_overrides_are_toml_values_or_bare_words() -> None:
    plan = RunPlan.parse(TWO_LINES, overrides={"local.lr": "0.1", "uplink.codec": "int8", "run.target.value": "0.9"})
    assert (plan.local.lr, plan.uplink.codec, plan.run.target and plan.run.target.value) == (0.1, "int8", 0.9)


@pytest.mark.parametrize(
    ("overrides", "option", "what"),
    [
        ({"local.lr": "abc", "run.rounds": "3"}, "--set", "--set local.lr=abc: [local] lr = 'abc' is not valid"),
        ({"local.lr": "abc"}, "--sweep", "--sweep local.lr=abc: [local] lr = 'abc' is not valid"),
        (
            {"cohort.requires": "{nope = 1}"},
            "--set",
            "--set cohort.requires={nope = 1}: unknown key [cohort] requires.nope",
        ),
        ({"lokal.lr": "1"}, "--set", "plan with --set lokal.lr=1: unknown key [lokal]"),
        ({"run.task.name": "d"}, "--set", "--set run.task.name=d names no key"),
        ({"lr": "1"}, "--set", "--set lr=1 names no key"),
    ],
)
def test_a_wrong_value_that_was_typed_is_not_laid_to_the_file(overrides, option, what) -> None:
    with pytest.raises(PlanError) as refused:
        RunPlan.parse(TWO_LINES, overrides=overrides, option=option)
    assert refused.value.what == what


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lr", "--set local.lr=1, or --set server.lr=1"),
        ("rounds", "--set run.rounds=1"),
        ("codecs", "--set uplink.codec=1, or --set downlink.codec=1"),
        ("zzz", "--set section.key=value, as in --set local.lr=0.1"),
        (".lr", "--set section.key=value, as in --set local.lr=0.1"),
    ],
)
def test_a_key_without_its_section_is_told_in_full(key: str, hint: str) -> None:
    with pytest.raises(PlanError) as refused:
        RunPlan.parse(TWO_LINES, overrides={key: "1"})
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("9" * 5000, f"--set local.lr={'9' * 200}... is not readable"),
        ("[" * 5000, f"--set local.lr={'[' * 200}... is not readable"),
        ("1\nx=2", r"--set local.lr=1\nx=2 is more than a value"),
        ("1\n[x]", r"--set local.lr=1\n[x] is more than a value"),
        ("a\nvalue", r"--set local.lr=a\nvalue is more than a value"),
        ("1\nvalue=2", r"--set local.lr=1\nvalue=2 is more than a value"),
    ],
)
def test_what_was_typed_is_one_value_that_can_be_read(value: str, what: str) -> None:
    with pytest.raises(PlanError) as refused:
        RunPlan.parse(TWO_LINES, overrides={"local.lr": value})
    assert refused.value.what == what


def test_a_number_of_thousands_of_digits_in_the_file_is_refused_in_words() -> None:
    with pytest.raises(PlanError, match="plan is not TOML"):
        RunPlan.parse(TWO_LINES + f"steps = {'9' * 5000}\n")


def test_what_is_wrong_in_the_file_and_what_was_typed_are_told_apart() -> None:
    with pytest.raises(PlanError) as refused:
        RunPlan.parse(TWO_LINES + "[server]\nlr = 'fast'\n", "plan.toml", {"local.lr": "abc"})
    assert "--set local.lr=abc: [local] lr = 'abc' is not valid" in refused.value.what
    assert "plan.toml: [server] lr = 'fast' is not valid" in refused.value.what


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ('[run]\ntask="d"\nround=3\n[local]\nlr=1', "unknown key [run] round", "[run] rounds"),
        ('[run]\ntask="d"\n[str]\nint=3\n[local]\nlr=1', "unknown key [str]", "thinwire plan keys"),
        ('[run]\ntask="d"\n[locl]\nlr=1', "unknown key [locl]", "[local] instead of [locl]"),
        ('[run]\ntask="d"\n[local]\nlrr=1', "[local] lr is missing; unknown key", "[local] lr instead of [local] lrr"),
        ('[run]\ntask="d"\n[local]\nsteps=1\nrate=1', "[local] lr is missing; unknown key", "[local] lr = 0.1"),
        ('[run]\ntask="d"', "[local] is missing", "[local] lr"),
        ('[run]\ntask="d"\n[local]\n', "[local] lr is missing", "[local] lr = 0.1"),
        ('[run]\ntask="d"\n[local]\nlr=-1', "[local] lr = -1 is not valid", "thinwire plan keys local"),
        ('[run]\ntask="d"\n[local]\nlr=nan', "[local] lr", "thinwire plan keys local"),
        ('[run]\ntask="../x"\n[local]\nlr=1', "[run] task = '../x' is not valid", "thinwire plan keys run"),
        ('[run]\ntask="d"\n[local]\nlr=1\n[cohort]\nclients="most"', "[cohort] clients = 'most'", "plan keys cohort"),
        (f'[run]\ntask="d"\n[local]\nlr=1\n[uplink]\nladder={["int8"] * 33}', "[uplink] ladder", "plan keys uplink"),
        ("[run", "is not TOML", 'key = "value"'),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_to_try(text: str, what: str, hint: str) -> None:
    with pytest.raises(PlanError) as error:
        RunPlan.parse(text)
    assert what in error.value.what
    assert error.value.why
    assert hint in error.value.hint
    assert error.value.exit_code == 3


def test_several_wrong_keys_have_each_their_own_suggestion_in_one_error() -> None:
    with pytest.raises(PlanError) as error:
        RunPlan.parse('[run]\ntask="d"\nround=3\nsede=1\n[local]\nlr=1\nstep=5\n[cohort]\nclients=0')
    assert error.value.hint.split("\n") == [
        "1. [run] rounds", "2. [run] seed", "3. thinwire plan keys cohort", "4. [local] steps",
    ]  # fmt: skip
    table, value, step = error.value.why.split("\n")
    assert table.startswith("1, 2. unknown key [run] round, unknown key [run] sede: [run] has the keys task, ")
    assert value.startswith("3. [cohort] clients = 0 is not valid: it should be ")
    assert step.startswith("4. unknown key [local] step: [local] has the keys ")


@pytest.mark.parametrize(
    ("more", "why", "hint"),
    [
        ("[cohort]\ndeadline_s = 0", 'it should be "auto" or above 0 (', "thinwire plan keys cohort"),
        ("[cohort]\ndeadline_s = 'soon'", 'it should be "auto" or a number (seconds a', "thinwire plan keys cohort"),
        ("[cohort]\nclients = 'x'", 'or a number (selected each round: "all", a count, ', "thinwire plan keys cohort"),
        ("steps = 1.5", 'it should be a whole number or "auto" (optimizer', "thinwire plan keys local"),
        ("min_steps = 0", "it should be at least 1", "thinwire plan keys local"),
        ("partial = 3", "it should be true or false", "thinwire plan keys local"),
        ("overlap = 1", "it should be a table", "[local] overlap = { max_delay = 1 }"),
        ("[uplink]\nwarmup = 3", "it should be a table", "[uplink] warmup = { rounds = ..., ratios = ... }"),
    ],
)
def test_what_a_value_should_be_is_said(more: str, why: str, hint: str) -> None:
    with pytest.raises(PlanError) as error:
        RunPlan.parse(TWO_LINES + more)
    assert why in error.value.why
    assert error.value.hint == hint


def test_a_file_in_the_place_of_a_task_s_name_is_refused_with_where_it_goes() -> None:
    with pytest.raises(PlanError, match="task = 'task.py' is not valid") as error:
        RunPlan.parse(TWO_LINES.replace("digits", "task.py"))
    assert "its code is given apart from the plan, as NAME=MODULE" in error.value.why


def test_a_misspelt_codec_reduction_or_optimizer_is_told_beside_wrong_keys() -> None:
    text = TWO_LINES + "step = 1\n[uplink]\ncodec = 'topq(0.01)'\nladder = ['int9']\nlayers = { '*.b' = 'fp61' }\n"
    with pytest.raises(PlanError) as error:
        RunPlan.parse(text + "[server]\nreduce = 'krumm(1)'\noptimizer = 'fedadan'\n", codecs=codecs)
    assert error.value.hint.split("\n") == [
        "1. [local] steps", "2. topk", "3. fp16", "4. int8", "5. fedadam", "6. krum",
    ]  # fmt: skip
    assert "[uplink] codec = 'topq(0.01)': no codec 'topq'; [uplink] layers.*.b = 'fp61': no" in error.value.what


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(PlanError) as error:
        RunPlan.parse('[run]\ntask="d"\nround=3\n[local]\nlr=1\nbatchsize=2')
    assert "[run] round" in error.value.what
    assert "[local] batchsize" in error.value.what


def test_a_plan_file_that_is_not_there_is_a_plan_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        RunPlan.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("[uplink]\ncodec = 'topq(0.1)'", "no codec 'topq'"),
        ("[uplink]\ncodec = 'topk(2)'", "topk(2)"),
        ("[uplink]\ncodec = 'int8 > topk(0.1)'", "int8 > topk(0.1)"),
        ("[uplink.layers]\n'*.bias' = 'nope'", '[uplink.layers] "*.bias"'),
        ("[secure]\nenabled = true", "[secure] enabled"),
        ("[privacy]\nmode = 'central'", "[privacy] mode"),
        ("[cohort]\nbuffer = 3", "[cohort] buffer = 3 with mode"),
        ("[cohort]\nselection = 'speed'", '[cohort] selection = "speed" with clients = "all"'),
        ("[cohort]\nselection = 'link'\nmode = 'buffered'", '[cohort] selection = "link" with mode = "buffered"'),
        ("[cohort]\nmax_concurrency = 3\nover_select = 0.5\nclients = 6", "in rounds, with over_select = 0.5"),
        ("partial = true\n[cohort]\nmax_concurrency = 3", "in rounds, with [local] partial = true"),
        ("[cohort]\nmode = 'buffered'\nclients = 3", "[cohort] clients = 3 with mode"),
        ("[cohort]\nmode = 'buffered'\nover_select = 0.5", "[cohort] over_select = 0.5 with mode"),
        ("[cohort]\nmode = 'buffered'\nlate = 'drop'", "[cohort] late"),
        ("[cohort]\nmode = 'buffered'\nmin_updates = 11", "[cohort] min_updates = 11 with mode"),
        ("[cohort]\nmode = 'buffered'\n[uplink]\nfeedback = 'ef21'", '[uplink] feedback = "ef21" with mode'),
        ("[cohort]\nmode = 'buffered'\n[secure]\nenabled = true", "[secure] enabled = true with mode"),
        ("[cohort]\nmode = 'buffered'\n[privacy]\nmode = 'central'", '[privacy] mode = "central" with mode'),
        ("[server]\nreduce = 'median'", "[server] reduce"),
        ("[privacy]\nnoise_multiplier = 1.0", "[privacy] noise_multiplier = 1.0"),
        ("[secure]\npost_quantum = true", "[secure] post_quantum = true"),
        ("[downlink]\ncodec = 'powersgd(2)'", "cannot carry the downlink"),
        ("[local.overlap]\n[cohort]\nmax_concurrency = 3", "[cohort] max_concurrency = 3 with [local] overlap"),
        ("partial = true\n[local.overlap]", "[local] partial = true with [local] overlap"),
        ("steps = 'auto'\n[local.overlap]\n[cohort]\ndeadline_s = 9", '[local] steps = "auto" with [local] overlap'),
        ("[local.overlap]\n[cohort]\nmode = 'buffered'", '[cohort] mode = "buffered" with [local] overlap'),
        ("[local.overlap]\n[secure]\nenabled = true", "[secure] enabled = true with [local] overlap"),
        ("[local.overlap]\n[privacy]\nmode = 'central'", '[privacy] mode = "central" with [local] overlap'),
        (
            "[local.overlap]\n[uplink]\nfeedback = 'ef21'\n[cohort]\nlate = 'drop'",
            '[uplink] feedback = "ef21" with [local] overlap',
        ),
        ("steps = 1\nmomentum = 0.9", "[local] momentum = 0.9 with steps = 1"),
        ("steps = 1\nprox = 0.1", "[local] prox = 0.1 with steps = 1"),
        ("prox = 20", "[local] prox = 20 with lr = "),
        ("min_steps = 4", "[local] min_steps = 4 without partial work"),
        ("lr_end = 0.1", '[local] lr_end = 0.1 with schedule = "constant"'),
        (
            "durability = 'exit'\n[uplink]\nfeedback = 'ef21'\n[cohort]\nlate = 'drop'",
            '[local] durability = "exit" with [uplink] feedback',
        ),
        ("durability = 'exit'\n[secure]\nenabled = true", '[local] durability = "exit" with [secure]'),
        ("durability = 'exit'\n[privacy]\nmode = 'example'", '[local] durability = "exit" with [privacy]'),
        (
            "partial = true\n[uplink]\nfeedback = 'ef21'\n[cohort]\nlate = 'drop'",
            '[local] partial = true with [uplink] feedback = "ef21"',
        ),
        ("steps = 'auto'", '[local] steps = "auto" with deadline_s = "auto"'),
        ("steps = 'auto'\nepochs = 2\n[cohort]\ndeadline_s = 60", "[local] steps and epochs are both given"),
        ("partial = true\nmin_steps = 9\nsteps = 8", "[local] min_steps = 9 with steps = 8"),
        ("[uplink]\nfeedback = 'ef21'", "late updates that count less"),
        ("[uplink]\nfeedback = 'ef21'\ncodec = 'twobit(1)'", "ef21 around 'twobit(1)'"),
        ("[uplink]\nfeedback = 'none'\ncodec = 'powersgd(2) > fp16'", "'powersgd(2) > fp16' without feedback"),
        ("[uplink]\nfeedback = 'none'\nladder = ['fp16', 'twobit(1)']", "'twobit(1)' without feedback"),
        ("[uplink]\nfeedback = 'none'\nlayers = {a = 'twobit(1)'}", "'twobit(1)' without feedback"),
        ("[uplink]\nfeedback = 'none'\ncodec = 'layers(a=powersgd(1); *=fp16)'", "'powersgd(1)' without feedback"),
        ("[server]\noptimizer = 'fedsgd'", "no server optimizer 'fedsgd'"),
        ("[server]\noptimizer = 'fedavgm'\ntau = 0.1", "[server] tau with optimizer = 'fedavgm'"),
        ("[uplink]\nmomentum = 0.9", "[uplink] momentum = 0.9 with several local steps"),
        ("steps = 1\n[uplink]\nmomentum = 0.9\nfeedback = 'none'", "[uplink] momentum = 0.9 with feedback"),
        ("[uplink]\nfeedback_decay = 0.5\nfeedback = 'none'", "[uplink] feedback_decay = 0.5 with feedback"),
        ("[run.target]\nvalue = 0.9\n[cohort]\nmin_updates = 2.5", "min_updates"),
        ("[cohort]\nclients = 3\nmin_updates = 4", "[cohort] min_updates = 4 with clients = 3"),
        ("[cohort]\nclients = 3\nover_select = 0.5\nmin_updates = 6", "[cohort] min_updates = 6 with clients = 3"),
    ],
)
def test_what_cannot_hold_together_is_refused(more: str, what: str) -> None:
    found = refusals(more)
    assert any(what in refusal for refusal in found), found


@pytest.mark.parametrize("codec", ["ternary", "qsgd(2)", "topk(0.1) > sign", "eden(2)", "randk(0.1)"])
def test_what_promises_something_of_each_update_needs_no_feedback(codec: str) -> None:
    assert refusals(f"[uplink]\nfeedback = 'none'\ncodec = '{codec}'") == []


@pytest.mark.parametrize("more", ["", "buffer = 3\nmax_concurrency = 4\nmin_updates = 3\nmax_staleness = 40"])
def test_a_buffered_plan_can_run(more: str) -> None:
    assert refusals(f"[cohort]\nmode = 'buffered'\n{more}") == []


def test_places_and_work_that_fits_a_deadline_may_stand_beside_each_other_in_buffered_rounds_only() -> None:
    local, cohort = "steps = 'auto'\npartial = true\n", "[cohort]\nmax_concurrency = 4\ndeadline_s = 60\n"
    assert refusals(local + cohort + "mode = 'buffered'") == []
    assert len(refusals(local + cohort)) == 2


def test_steps_and_epochs_exclude_each_other() -> None:
    plan = RunPlan.parse('[run]\ntask="d"\n[local]\nlr=1\nsteps=5\nepochs=2')
    assert "both given" in plan.check(codecs)[0].what


def test_a_deadline_under_every_devices_best_is_refused() -> None:
    plan = RunPlan.parse(TWO_LINES + "[cohort]\ndeadline_s = 3")
    slow, quick = DeviceTimes(2, 4, 1), DeviceTimes(0.1, 0.5, 0.1)
    assert "deadline_s" in plan.check(codecs, {"a": slow})[0].what
    assert plan.check(codecs, {"a": slow, "b": quick}) == []


@pytest.mark.parametrize(
    ("uplink", "feedback"),
    [
        ("", "none"),
        ("codec = 'eden(1)'", "none"),
        ("feedback = 'auto'", "none"),
        ("codec = 'topk(0.1)'", "classic"),
        ("codec = 'dgc(0.1)'", "classic"),
        ("codec = 'int8'\nlayers = {a = 'sign'}", "classic"),
        ("ladder = ['fp16', 'int8']", "classic"),
        ("codec = 'int8'\nfeedback = 'classic'", "classic"),
    ],
)
def test_auto_feedback_is_none_for_unbiased_codecs_and_a_default_that_is_written_out_changes_nothing(
    uplink: str, feedback: str
) -> None:
    plan = RunPlan.parse(f'[run]\ntask = "toy"\n[local]\nlr = 1\n[uplink]\n{uplink}')
    assert feedback_of(plan.uplink) == feedback
    assert feedback_of(RunPlan.from_json(plan.to_json()).uplink) == feedback
