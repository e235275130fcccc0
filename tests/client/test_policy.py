"""What a device's owner forbids is declined, one rule a test; so is whatever cannot be established."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.client.policy import Kind, Mode, Policy
from thinwire.client.policy_rules import PolicyContext, decide
from thinwire.core import RunPlan

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=timezone(timedelta(hours=1)))
CARRIES = frozenset({"secure", "secure.post_quantum", "secure.malicious"})
FACTS = PolicyContext(NOON, metered=False, carries=CARRIES)
TEXT = """
[run]
task = "ecg"
evaluate = "off"
[cohort]
deadline_s = 60
late = "drop"
[local]
lr = 0.1
steps = 5
buffers = "local"
"""
PLAN: dict[str, Any] = RunPlan.parse(TEXT).to_json()  # with masks or with noise it contradicts nothing
KINDS: tuple[Kind, ...] = get_args(Kind)
MODES: tuple[Mode, ...] = get_args(Mode)


def plan(**sections: Any) -> dict[str, Any]:
    privacy = sections.get("privacy", {})
    if privacy.get("mode", "off") != "off":
        noise = {} if "target_epsilon" in privacy else {"noise_multiplier": 1.0}
        sections["privacy"] = {"clip": 1.0, **noise, **privacy}
    return PLAN | {name: PLAN[name] | keys for name, keys in sections.items()}


def said(
    policy: Policy,
    assigned: dict[str, Any] = PLAN,
    facts: PolicyContext = FACTS,
    kind: str = "train",
    task: str = "ecg",
) -> str:
    declined = decide(policy, task, kind, assigned, facts)
    return declined.text if declined else ""


def rule_of(*args: Any, **more: Any) -> str:
    return said(*args, **more).partition(":")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_policy_every_kind_is_approved(kind):
    assert said(Policy(), kind=kind, facts=PolicyContext(None, None)) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_is_not_allowed_is_declined_for_every_kind(kind):
    assert said(Policy(tasks=["mri"]), kind=kind) == "tasks: this task is not among those allowed here"
    assert said(Policy(tasks=["mri", "ecg"]), kind=kind) == ""


def test_an_assignment_for_one_task_with_the_plan_of_another_is_declined():
    assert rule_of(Policy(), task="mri") == "tasks"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_not_allowed_is_declined(kind):
    others = [other for other in KINDS if other != kind]
    assert said(Policy(kinds=others), kind=kind) == f"kinds: {kind} is not allowed here"
    assert said(Policy(kinds=[kind]), kind=kind) == ""


def test_a_kind_that_this_version_does_not_know_is_declined():
    assert rule_of(Policy(), kind="unmask") == "kinds"


def test_a_stop_is_never_declined():
    assert (
        said(Policy(tasks=["mri"], secure="required"), {"what": "ever"}, PolicyContext(None, None), kind="stop") == ""
    )


def test_masks_are_required_where_the_owner_says_so():
    assert rule_of(Policy(secure="required")) == "secure"
    assert said(Policy(secure="required"), plan(secure={"enabled": True})) == ""
    assert said(Policy(), plan(secure={"enabled": True})) == ""


def test_a_plan_with_masks_is_declined_by_a_version_that_has_none():
    """It would send in the clear what the plan promises to mask: declined with any policy."""
    assert rule_of(Policy(), plan(secure={"enabled": True}), replace(FACTS, carries=frozenset())) == "secure"


@pytest.mark.parametrize(
    ("secure", "needed"),
    [({"post_quantum": True}, "secure.post_quantum"), ({"adversary": "malicious"}, "secure.malicious")],
)
def test_a_plan_is_declined_that_needs_what_this_device_does_not_have(secure, needed):
    """ML-KEM in its package cryptography, or a roster that its owner pinned."""
    assigned = plan(secure={"enabled": True, **secure})
    assert rule_of(Policy(), assigned, replace(FACTS, carries=CARRIES - {needed})) == "secure"
    assert rule_of(Policy(), assigned) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_with_masks_has_only_replies_under_masks(kind):
    """A first model and the metrics of one client would leave in the clear what the plan promises to hide."""
    for policy in (Policy(), Policy(secure="required")):
        declined = "" if kind == "train" else "secure"
        assert rule_of(policy, plan(secure={"enabled": True}), kind=kind) == declined


@pytest.mark.parametrize(
    ("clients", "selected", "declined"), [("all", 10, ""), (10, 12, "secure"), (0.5, 13, "secure")]
)
def test_over_selection_that_the_planned_drop_outs_do_not_cover_is_declined(clients, selected, declined):
    cohort = {"clients": clients, "over_select": 0.0 if clients == "all" else 0.3}
    facts = replace(FACTS, selected=selected)
    assert rule_of(Policy(), plan(secure={"enabled": True}, cohort=cohort), facts) == declined


MASKED: dict[str, Any] = {"adversary": "curious", "max_corrupt_assumed": 0.0, "min_cohort": 1, "min_survivors": 1}


@pytest.mark.parametrize("key", MASKED)
def test_a_rule_on_masks_declines_every_plan_in_the_clear(key):
    """Where the owner bounds a sum from below, a round that shows each update alone is no round of that kind."""
    assert (
        said(Policy(**{key: MASKED[key]})) == f"{key}: the plan sums in the clear, so the aggregator sees each update"
    )
    assert said(Policy(**{key: MASKED[key]}), plan(secure={"enabled": True, "min_survivors": 1})) == ""


@pytest.mark.parametrize(
    ("own", "assigned", "declined"),
    [
        ("malicious", "curious", "adversary"),
        ("malicious", "malicious", ""),
        ("curious", "curious", ""),
        ("curious", "malicious", ""),
        (None, "curious", ""),
    ],
)
def test_a_plan_withstands_no_weaker_aggregator_than_the_owner_assumes(own, assigned, declined):
    assert rule_of(Policy(adversary=own), plan(secure={"enabled": True, "adversary": assigned})) == declined


def test_the_owner_demands_that_at_least_a_share_of_corrupt_clients_is_withstood():
    policy = Policy(max_corrupt_assumed=0.2)
    shares = [0.0, 0.19, 0.2, 0.5]
    found = [rule_of(policy, plan(secure={"enabled": True, "max_corrupt": share})) for share in shares]
    assert found == ["max_corrupt_assumed", "max_corrupt_assumed", "", ""]


def test_a_sum_has_at_least_as_many_survivors_as_the_owner_says():
    found = [rule_of(Policy(min_survivors=5), plan(secure={"enabled": True, "min_survivors": n})) for n in (0, 4, 5, 6)]
    assert found == ["min_survivors", "min_survivors", "", ""]


@pytest.mark.parametrize(
    ("cohort", "selected", "declined"),
    [
        ({"clients": 9}, None, "min_cohort"),
        ({"clients": 8, "over_select": 0.25}, None, ""),
        ({"clients": "all"}, None, ""),
        ({"clients": "all"}, 9, "min_cohort"),
        ({"clients": 0.5}, 10, ""),
        ({"clients": 20}, 9, "min_cohort"),
    ],
)
def test_a_round_has_at_least_as_many_clients_as_the_owner_says(cohort, selected, declined):
    """The terms of the round decide; before them a plan that selects all or a share does not say how many."""
    facts = replace(FACTS, selected=selected)
    assigned = plan(secure={"enabled": True, "max_dropout": 0.2}, cohort=cohort)
    assert rule_of(Policy(min_cohort=10), assigned, facts) == declined


def test_terms_that_have_no_threshold_are_declined_with_any_policy():
    malicious = plan(secure={"enabled": True, "adversary": "malicious", "max_dropout": 0.4, "max_corrupt": 0.3})
    assert said(Policy(), malicious, replace(FACTS, selected=10)).startswith(
        "secure: no threshold withstands a malicious"
    )
    assert rule_of(Policy(), plan(secure={"enabled": True}), replace(FACTS, selected=2)) == "secure"
    assert rule_of(Policy(), plan(secure={"enabled": True}), replace(FACTS, selected=3)) == ""
    assert rule_of(Policy(), facts=replace(FACTS, selected=1)) == ""


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_privacy_that_is_not_among_the_owners_is_declined(mode):
    assigned = plan(privacy={"mode": mode})
    others = [other for other in MODES if other != mode]
    assert said(Policy(privacy=others), assigned) == f'privacy: mode = "{mode}" is not private enough here'
    assert "not private enough" not in said(Policy(privacy=[mode]), assigned)


@pytest.mark.parametrize(
    ("privacy", "after", "rule"),
    [
        ({"mode": "off"}, None, "max_epsilon"),
        ({"mode": "off", "target_epsilon": 1.0}, 1.0, "max_epsilon"),
        ({"mode": "central", "target_epsilon": 4.0}, None, "max_epsilon"),  # what a plan claims proves nothing
        ({"mode": "central", "target_epsilon": 1.0}, 4.5, "max_epsilon"),
        ({"mode": "central", "budget": 3.0}, float("nan"), "max_epsilon"),
        ({"mode": "central"}, float("inf"), "max_epsilon"),
        ({"mode": "central", "target_epsilon": 9.0, "delta": 1e-3}, 4.0, ""),  # the device has a delta of its own
    ],
)
def test_no_more_epsilon_is_spent_than_the_owner_allows(privacy, after, rule):
    assert rule_of(Policy(max_epsilon=4.0), plan(privacy=privacy), replace(FACTS, epsilon_after=after)) == rule


@pytest.mark.parametrize(
    ("own", "is_declined"),
    [
        ({}, True),
        ({"adversary": "malicious"}, True),
        ({"adversary": "curious", "max_corrupt_assumed": 0.1}, True),
        ({"adversary": "malicious", "max_corrupt_assumed": 0.0}, True),
        ({"adversary": "malicious", "max_corrupt_assumed": 0.1}, False),
    ],
)
def test_an_epsilon_that_counts_on_the_noise_of_others_needs_a_bound_on_those_that_are_invented(own, is_declined):
    secure = {"enabled": True, "adversary": "malicious", "max_corrupt": 0.2}
    made = plan(privacy={"mode": "distributed"}, secure=secure)
    found = rule_of(Policy(max_epsilon=4.0, **own), made, replace(FACTS, epsilon_after=1.0))
    assert (found == "max_epsilon") == is_declined


@pytest.mark.parametrize(("secure", "rule"), [({"post_quantum": False}, "post_quantum"), ({"post_quantum": True}, "")])
def test_the_owner_demands_masks_that_a_quantum_computer_does_not_open(secure, rule):
    assert rule_of(Policy(post_quantum="required"), plan(secure={"enabled": True, **secure})) == rule


@pytest.mark.parametrize(
    ("privacy", "took_part", "rule"),
    [
        ({"mode": "off"}, 0, "max_participations"),
        ({"mode": "central"}, None, "max_participations"),
        ({"mode": "central"}, 3, "max_participations"),
        ({"mode": "central"}, 2, ""),
    ],
)
def test_no_data_take_part_more_often_than_the_owner_allows(privacy, took_part, rule):
    facts = replace(FACTS, participations=took_part)
    assert rule_of(Policy(max_participations=3), plan(privacy=privacy), facts) == rule
    init = "" if privacy["mode"] == "off" else "privacy"
    assert rule_of(Policy(max_participations=3), plan(privacy=privacy), facts, kind="init") == init


@pytest.mark.parametrize("mode", ["central", "distributed", "local", "example"])
def test_a_private_plan_is_declined_while_it_is_not_known_what_this_device_has_spent(mode):
    facts = replace(FACTS, no_ledger="privacy.jsonl is damaged")
    assert said(Policy(), plan(privacy={"mode": mode}), facts) == "privacy: privacy.jsonl is damaged"
    assert said(Policy(), facts=facts) == ""


# Of 20 rounds: five nodes have the update of a client, so their noise counts as one of 1 / sqrt(5).
ONCE_IN_A_TREE = {"mode": "central", "mechanism": "tree", "max_participations": 1}


@pytest.mark.parametrize(
    ("privacy", "rule"),
    [
        ({"mode": "off", "noise_multiplier": 2.0}, "min_noise"),
        ({"mode": "central", "target_epsilon": 1.0}, "min_noise"),
        ({"mode": "central", "noise_multiplier": 0.9}, "min_noise"),
        ({"mode": "central", "noise_multiplier": 1.0}, ""),
        ({**ONCE_IN_A_TREE, "noise_multiplier": 2.2}, "min_noise"),
        ({**ONCE_IN_A_TREE, "noise_multiplier": 2.3}, ""),
    ],
)
def test_no_less_noise_is_added_than_the_owner_allows(privacy, rule):
    assert rule_of(Policy(min_noise=1.0), plan(privacy=privacy, cohort={"clients": 10})) == rule


def test_outside_the_hours_nothing_begins():
    assert rule_of(Policy(hours="22:00-06:00")) == "hours"
    assert said(Policy(hours="12:00-12:01")) == ""


def test_with_hours_and_no_clock_nothing_begins():
    assert (
        said(Policy(hours="00:00-23:59"), facts=replace(FACTS, now=None, no_clock="it is 1970")) == "hours: it is 1970"
    )


@pytest.mark.parametrize(("hours", "again_s"), [("13:00-14:00", 3600), ("06:00-12:00", 18 * 3600)])
def test_who_declines_by_the_hour_says_how_long_it_stays_so(hours, again_s):
    assert said(Policy(hours=hours)).endswith(f" (again in {again_s} s)")
    later = replace(FACTS, now=NOON + timedelta(seconds=again_s))
    assert said(Policy(hours=hours), facts=later) == ""


def test_a_day_that_is_used_up_ends_at_midnight():
    text = said(Policy(rounds_a_day=1), facts=replace(FACTS, admitted=1))
    assert text == "rounds_a_day: the 1 of today are used up (again in 43200 s)"


@given(begin=st.times(), end=st.times(), at=st.times())
def test_of_two_spans_that_make_a_day_exactly_one_is_open(begin, end, at):
    begin, end = begin.replace(second=0, microsecond=0), end.replace(second=0, microsecond=0)
    if begin != end:
        one, other = (Policy(hours=f"{a:%H:%M}-{b:%H:%M}") for a, b in ((begin, end), (end, begin)))
        assert one.is_open(at) != other.is_open(at)
        assert one.is_open(begin)
        assert not one.is_open(end)


def test_so_many_a_day_and_no_more():
    policy = Policy(rounds_a_day=3)
    assert [rule_of(policy, facts=replace(FACTS, admitted=n)) for n in (0, 2, 3, 4)] == ["", "", *["rounds_a_day"] * 2]


@pytest.mark.parametrize("facts", [replace(FACTS, admitted=None), replace(FACTS, now=None)])
def test_counts_that_are_not_readable_or_a_day_that_is_not_known_are_declined(facts):
    assert rule_of(Policy(rounds_a_day=3), facts=facts) == "rounds_a_day"


def test_a_metered_link_is_refused_and_so_is_one_that_may_be_metered():
    refuse, allow = Policy(metered="refuse"), Policy(metered="allow")
    assert [rule_of(refuse, facts=replace(FACTS, metered=m)) for m in (True, None, False)] == ["metered", "metered", ""]
    assert [rule_of(allow, facts=replace(FACTS, metered=m)) for m in (True, None, False)] == ["", "", ""]


names = st.text(min_size=1, max_size=2000)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.dictionaries(names, st.integers()))
SECTIONS = [name for name in PLAN if name != "plan_version"]


@given(
    section=st.sampled_from(["", *SECTIONS, "cohort.requires"]), key=names, value=values, kind=st.sampled_from(KINDS)
)
def test_a_plan_with_a_key_that_this_version_does_not_know_is_declined(section, key, value, kind):
    assigned: dict[str, Any] = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in PLAN.items()}
    table = assigned
    for name in section.split(".") if section else ():
        table[name] = dict(table[name])
        table = table[name]
    if key not in table:
        table[key] = value
        text = said(Policy(), assigned, kind=kind)
        assert text.startswith("plan: this version cannot judge it")
        assert len(text) < 400


@pytest.mark.parametrize(
    "assigned",
    [
        {},
        [],
        {"run": 1},
        PLAN | {"plan_version": 2},
        plan(privacy={"mode": "none"}),
        plan(secure={"adversary": "none"}),
        plan(privacy={"delta": float("nan")}),
    ],
)
def test_a_plan_that_is_not_readable_is_declined(assigned):
    assert rule_of(Policy(), assigned) == "plan"
