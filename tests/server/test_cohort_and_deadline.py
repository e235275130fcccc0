"""Who is selected, who is waited for, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core import RunPlan
from thinwire.core.fleet import ClientConnected, Hello, TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan_values import Target
from thinwire.reports.reason_text import deadline_sentence, sentence
from thinwire.server.evaluation import better, pooled, spread
from thinwire.server.policy.assignment_terms import auto_deadline, evaluation_deadline
from thinwire.server.policy.cohort import select_clients, wait_reason
from thinwire.server.policy.eligibility import ConnectedDevices, Eligibility, mismatch


def plan(**cohort: object) -> RunPlan:
    return RunPlan.from_json({"run": {"task": "digits", "seed": 3}, "local": {"lr": 1}, "cohort": cohort})


devices = st.lists(st.sampled_from([f"pi-{i:02}" for i in range(20)]), unique=True, min_size=1)


@settings(deadline=None)
@given(devices, st.integers(1, 50), st.integers(1, 8))
def test_the_draw_depends_on_seed_round_and_candidates_only(present: list[str], number: int, count: int) -> None:
    first = select_clients(plan(clients=count), number, present, {}, {})
    assert first == select_clients(plan(clients=count), number, list(reversed(present)), {}, {})
    assert len(first.selected) == min(count, len(present))
    assert set(first.selected) <= set(present)


def test_every_device_is_drawn_about_as_often() -> None:
    present = [f"pi-{i}" for i in range(10)]
    counts = dict.fromkeys(present, 0)
    for number in range(1000):
        for device in select_clients(plan(clients=3), number, present, {}, {}).selected:
            counts[device] += 1
    assert all(230 <= count <= 370 for count in counts.values()), counts  # 300 +- 5 sigma


def test_those_not_selected_have_a_reason_unless_they_were_not_sampled() -> None:
    cohort = select_clients(plan(clients=1), 4, ["a", "b", "c", "d"], {"a": "has no task"}, {"b": 3})
    assert sentence(cohort.reasons["a"]) == "has no task"
    assert cohort.reasons["b"] == [("busy", {"round": 3})]
    assert len(cohort.selected) == 1
    assert cohort.reasons.keys() == {"a", "b"}, "reading the round says of the others that they were not sampled"


def test_a_fraction_is_of_those_present_and_over_selection_assignments_more_than_it_wants() -> None:
    present = [f"pi-{i}" for i in range(10)]
    assert len(select_clients(plan(clients=0.25), 1, present, {}, {}).selected) == 3
    wide = select_clients(plan(clients=4, over_select=0.5), 1, present, {}, {})
    assert (len(wide.selected), wide.target_updates) == (6, 4)


def test_waiting_names_the_missing_and_the_unable() -> None:
    said = wait_reason(plan(wait_for=["pi-04", "pi-05", "pi-07"]), ["pi-05", "pi-07"], {"pi-07": "has no task 't'"})
    assert said == "waiting: 1 of 3 devices (missing pi-04; pi-07 has no task 't')"
    assert wait_reason(plan(wait_for=2), ["a", "b"], {}) is None


def test_waiting_says_that_fewer_devices_are_known_than_are_waited_for() -> None:
    said = wait_reason(plan(wait_for=5), ["a", "b"], {}, known=lambda: 3)
    assert said == "waiting: 2 of 5 devices (only 3 known: more have to join)"
    assert wait_reason(plan(wait_for=5), ["a", "b"], {}, known=lambda: 5) == "waiting: 2 of 5 devices"


def test_waiting_says_something_of_few_devices_where_many_are_unable() -> None:
    said = wait_reason(plan(wait_for=1), list("abcdefg"), dict.fromkeys("abcdefg", "is shy"))
    assert said == "waiting: 0 of 1 device (a, b, c, d, e: each is shy; and 2 more)"


@pytest.mark.parametrize("begun", [False, True])
def test_a_round_that_selects_fewer_than_a_step_needs_is_waited_with(begun: bool) -> None:
    count = plan(min_updates=3)
    said = wait_reason(count, ["a", "b", "c"], {"c": "has no task"}, begun)
    more = "more devices have to connect, or to be free"
    assert said == f"waiting: of 2 devices a round selects 2, and [cohort] min_updates = 3: {more} (c has no task)"
    assert wait_reason(count, ["a", "b", "c"], {}, begun) is None
    half = plan(clients=0.5, min_updates=3)
    said = wait_reason(half, list("abcd"), {}, begun)
    assert said == f"waiting: of 4 devices a round selects 2, and [cohort] min_updates = 3: {more}"
    assert wait_reason(half, list("abcde"), {}, begun) is None
    wide = plan(clients=0.5, min_updates=3, over_select=0.5)
    assert wait_reason(wide, list("abcd"), {}, begun) is None
    assert wait_reason(plan(wait_for=["a"], min_updates=2), ["a", "b"], {}, begun) is None


def test_a_round_for_which_no_graph_exists_is_waited_for() -> None:
    secure = 'enabled = true\ngraph = "k-regular"\nmax_corrupt = 0.4\nmax_dropout = 0.4'
    given = RunPlan.parse(f'[run]\ntask = "t"\n[local]\nlr = 1\n[cohort]\nclients = "all"\n[secure]\n{secure}')
    said = wait_reason(given, list("abcdefgh"), {})
    assert said is not None
    assert said.startswith("waiting: more devices (no k-regular graph of 8 clients withstands")


@settings(deadline=None)
@given(devices, st.integers(1, 6), st.sampled_from(["all", 2, 4, 0.5]), st.sampled_from([0.0, 0.3, 1.0]))
def test_whenever_nobody_is_waited_for_a_round_selects_as_many_as_a_step_needs(
    present: list[str], least: int, clients: str | float, excess: float
) -> None:
    given = plan(clients=clients, min_updates=least, over_select=0.0 if clients == "all" else excess)
    if wait_reason(given, present, {}) is None:
        assert select_clients(given, 1, present, {}, {}).wanted >= least


def test_a_device_is_matched_by_layout_version_or_digest() -> None:
    wanted = TaskReport("digits", version="2", source_digest="s2", layout_digest="L")
    same_layout = Hello("a", "p", (TaskReport("digits", version="1", source_digest="s1", layout_digest="L"),))
    other = Hello("a", "p", (TaskReport("digits", layout_digest="M"),))
    broken = Hello("a", "p", (TaskReport("digits", error="ImportError in task.py:3"),))

    def why(match: str, hello: Hello) -> str:
        raw = {"run": {"task": "digits", "task_match": match}, "local": {"lr": 1}}
        return mismatch(RunPlan.from_json(raw), wanted, hello)

    assert why("layout", same_layout) == ""
    assert why("version", same_layout) == "has version 1 of the task 'digits', the run has 2"
    assert "another source" in why("digest", same_layout)
    assert "another model" in why("layout", other)
    assert why("layout", Hello("a", "p")) == (
        "has no task 'digits' (type on it: thinwire client start --task digits=MODULE)"
    )
    assert "ImportError" in why("layout", broken)


@pytest.mark.parametrize(
    ("secure", "has", "why"),
    [
        ({"enabled": False}, (), ""),
        ({"enabled": True}, (), "cannot sum under masks: it is no Thinwire client of this version"),
        ({"enabled": True}, ("secure",), ""),
        ({"enabled": True, "post_quantum": True}, ("secure", "secure.malicious"), "has no ML-KEM for [secure] post_"),
        ({"enabled": True, "post_quantum": True}, ("secure", "secure.post_quantum"), ""),
        ({"enabled": True, "adversary": "malicious"}, ("secure", "secure.post_quantum"), "has pinned no roster"),
        ({"enabled": True, "adversary": "malicious"}, ("secure", "secure.malicious"), ""),
    ],
)
def test_a_device_is_selected_under_masks_only_if_it_has_what_the_plan_needs(secure, has, why) -> None:
    online, report = ConnectedDevices(), TaskReport("digits", layout_digest="L")
    online.apply(ClientConnected("a", Hello("a", "p", (report,), secure=has)))
    given = RunPlan.from_json({"run": {"task": "digits"}, "local": {"lr": 1}, "secure": secure})
    for simulated in (False, True):
        one = Eligibility(given, report, Layout(()), simulated, online, lambda device: "")
        assert one.reason("a")[: len(why)] == why
        assert bool(one.reason("a")) == bool(why)
        assert one.able() == ([] if why else ["a"])


def test_to_measure_a_model_takes_as_long_as_the_slowest_reply_of_three_rounds_says() -> None:
    assert evaluation_deadline([]) == 60.0
    assert evaluation_deadline([100.0, 4.0, 6.0, 5.0]) == 18.0
    assert evaluation_deadline([0.01]) == 10.0


@pytest.mark.parametrize(
    ("expected", "wanted", "seconds", "reason"),
    [
        ({"a": None, "b": None}, 2, 60.0, "60 s: no time of these devices is known yet"),
        ({"a": 0.1, "b": 0.2}, 2, 10.0, "10 s: the shortest allowed deadline; 2 of 2 replies are expected in 0.2 s"),
        ({"a": 10.0, "b": 20.0}, 2, 60.0, "60 s: 3 times the 20.0 s in which 2 of 2 replies are expected"),
        ({"a": 10.0, "b": 20.0, "c": 200.0}, 2, 60.0,
         "60 s: 3 times the 20.0 s in which 2 of 3 replies are expected; slower devices: 1 (c), up to 200.0 s"),
        ({"a": 10.0, "b": None, "c": 20.0}, 2, 60.0,
         ("60 s: 3 times the 20.0 s in which 2 of 3 replies are expected; "
          "not measured yet: 1, each counted as 20.0 s")),
        ({"a": 2.0} | dict.fromkeys("bcdefgh", 100.0), 1, 10.0,
         ("10 s: the shortest allowed deadline; 1 of 8 replies are expected in 2.0 s; "
          "slower devices: 7 (b, c, d, e, f, ...), up to 100.0 s")),
        ({"a": 5.0, "b": 400.0}, 2, 150.0,
         ("150 s: at most 10 times the deadline of the fastest 1 of the 2 wanted devices; "
          "slower devices: 1 (b), up to 400.0 s")),
        ({"a": 0.1, "b": 0.1, "c": 35.0, "d": None}, 4, 100.0,
         ("100 s: at most 10 times the deadline of the fastest 2 of the 4 wanted devices; "
          "not measured yet: 1, each counted as 35.0 s")),
    ],
)  # fmt: skip
def test_a_deadline_and_its_reason(expected: dict[str, float], wanted: int, seconds: float, reason: str) -> None:
    found = auto_deadline(expected, wanted)
    assert (found.seconds, deadline_sentence(found.seconds, found.reasons)) == (seconds, reason)


times = st.dictionaries(st.text("abc", min_size=1, max_size=5), st.none() | st.floats(0, 1e6), min_size=1, max_size=20)


@settings(deadline=None)
@given(times, st.integers(1, 25))
def test_a_deadline_leaves_the_wanted_ones_three_times_as_long(expected: dict[str, float | None], wanted: int) -> None:
    """Those that the floor needs in any case, the others unless they are far slower than the quicker half."""
    wanted = min(wanted, len(expected))
    needed = auto_deadline(expected, wanted, min_updates=wanted)
    in_time = [device for device, time in expected.items() if time is None or 3 * time <= needed.seconds]
    assert len(in_time) >= wanted or None in expected.values()
    assert 10.0 <= auto_deadline(expected, wanted).seconds <= needed.seconds


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=10), st.lists(st.floats(0, 1e12), max_size=9))
def test_fewer_than_half_of_the_wanted_cannot_lengthen_a_round_at_will(honest: list[float], sly: list[float]) -> None:
    sly = sly[: len(honest) - 1]
    expected = {f"honest-{i}": time for i, time in enumerate(honest)} | {f"sly-{i}": t for i, t in enumerate(sly)}
    deadline = auto_deadline(expected, wanted=len(expected), min_updates=len(expected) // 2)
    assert deadline.seconds <= max(100.0, 30 * max(honest) + 1.0)
    assert (deadline.usual_s is not None and deadline.usual_s <= deadline.seconds / 3) or deadline.seconds == 10.0


@settings(deadline=None)
@given(times, st.integers(1, 25), st.floats(1, 1e6))
def test_whoever_is_slower_than_the_wanted_ones_holds_nobody_up(
    expected: dict[str, float | None], wanted: int, slower: float
) -> None:
    known = {device: time for device, time in expected.items() if time is not None}
    if len(known) < wanted:
        return
    slow = max(known.values()) + slower
    assert auto_deadline({**known, "slow": slow}, wanted).seconds == auto_deadline(known, wanted).seconds


def test_metrics_are_pooled_by_their_counts() -> None:
    both = [{"eval/accuracy": (9.0, 10.0), "train/loss": (1.0, 1.0)}, {"eval/accuracy": (0.0, 90.0)}]
    assert pooled(both, "eval/") == {"accuracy": 0.09}
    assert spread(both, "eval/") == {"accuracy": [0.0, 0.9]}
    assert pooled([{"eval/loss": (0.0, 0.0)}], "eval/") == {}


def test_loss_is_minimised_and_everything_else_maximised() -> None:
    assert better("loss", 0.1, 0.2) and not better("loss", 0.3, 0.2)
    assert better("accuracy", 0.3, 0.2) and better("accuracy", 0.1, None)
    assert not better("loss", float("nan"), None)
    assert Target(metric="loss", value=0.2).is_met({"loss": 0.1})
    assert not Target(metric="accuracy", value=0.2).is_met({"accuracy": 0.1})


def test_a_device_with_another_model_is_told_which_tensors_differ() -> None:
    run, own = Layout.of({"w": (2, 3), "b": (2,)}), Layout.of({"w": (2, 4), "c": (1,)})
    wanted = TaskReport("digits", layout_digest=run.digest)
    one = RunPlan.from_json({"run": {"task": "digits"}, "local": {"lr": 1}})

    def why(tensors: str, digest: str = own.digest) -> str:
        return mismatch(one, wanted, Hello("a", "p", (TaskReport("digits", "", "", digest, tensors=tensors),)), run)

    assert why(own.text) == (
        "has another model in its task 'digits': w is 2x4 instead of 2x3; b is missing; c is added "
        "(install the run's task on it, then: thinwire client reload)"
    )
    unnamed = "has another model in its task 'digits' (install the run's task on it, then: thinwire client reload)"
    for liar in ("", "[", "[" * 10_000, '{"tensors":[[[],[],[],[]]],"aliases":[],"frozen":""}', run.text):
        assert why(liar) == unnamed
