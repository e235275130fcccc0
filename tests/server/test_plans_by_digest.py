"""A device is sent the plan once; who has lost it gets it again within the round, and nobody counts that against it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_bench import FAILS, Bench, ToldFleet, drive_through, killed, outcome, scripted, three
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, Event, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.core.fleet import ClientConnected, Envelope, Hello
from thinwire.core.types import Assignment, Failure, ReplyHeader, UpdateId
from thinwire.reports.reason_text import sentence
from thinwire.server.model_store import PlanCache, SentAssignments
from thinwire.simulation import Behavior, Script, ScriptedDevice


def forgetful(name: str, rounds: set[int], after_s: float = 1.0) -> ScriptedDevice:
    """Loses its plans at each of these rounds, the first time that it is selected."""

    def script(assignment: Assignment) -> Behavior:
        if assignment.round in rounds and assignment.kind == "train" and isinstance(assignment.plan, str):
            made.plans.clear()
        return Behavior(compute_s=after_s)

    made = scripted(name, script)
    return made


def carried(fleet: ToldFleet, device: str) -> list[tuple[str, int, str]]:
    """(kind, round, how the plan went) of everything that was sent to a device."""
    return [
        (e.assignment.kind, e.assignment.round, "digest" if isinstance(e.assignment.plan, str) else "whole")
        for e in fleet.sent
        if e.device == device
    ]


def test_a_device_that_answered_with_the_whole_plan_is_sent_the_digest_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a")], run={"rounds": 3})
    bench.drive()
    assert carried(bench.fleet, "a") == [
        ("train", 1, "whole"), ("train", 2, "digest"), ("train", 3, "digest"), ("evaluate", 3, "digest"),
        ("stop", 0, "digest"),
    ]  # fmt: skip


def test_a_device_that_failed_may_not_have_kept_the_plan(tmp_path: Path) -> None:
    fails = scripted("b", lambda assignment: FAILS if assignment.round == 1 else Behavior())
    bench = Bench(tmp_path, [scripted("a"), fails], run={"rounds": 3})
    bench.drive()
    assert [how for kind, _, how in carried(bench.fleet, "b") if kind == "train"] == ["whole", "whole", "digest"]


def test_a_hello_says_who_holds_the_plan_already(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a")], run={"rounds": 1})
    bench.fleet.devices["a"].plans = {_digest(bench)}
    bench.drive()
    assert {how for _, _, how in carried(bench.fleet, "a")} == {"digest"}


def _digest(bench: Bench) -> str:
    return RunPlan.from_json(bench.store.run(bench.run_id).plan).digest


def test_who_has_lost_the_plan_gets_it_with_the_same_assignment_and_has_not_failed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a"), forgetful("b", {2})], run={"rounds": 3})
    row = bench.drive()
    assert (row.status, bench.reasons()) == ("done", ["all"] * 3)
    assert bench.events(ClientFailed) == []
    assignments = [assignment for assignment in bench.assignments("b") if assignment.round == 2]
    assert len({assignment.assignment_id for assignment in assignments}) == 1
    first, again = assignments
    assert isinstance(first.plan, str)
    assert again == replace(first, plan=again.plan)
    assert [how for kind, _, how in carried(bench.fleet, "b") if kind == "train"] == [
        "whole", "digest", "whole", "digest",
    ]  # fmt: skip


def test_who_requests_the_plan_again_and_again_gets_it_once_and_has_then_failed(tmp_path: Path) -> None:
    never = Behavior(compute_s=0.0, failure=("need-plan", ""))
    bench = Bench(tmp_path, [scripted("a"), scripted("b", lambda assignment: never)], run={"rounds": 2})
    bench.fleet.devices["b"].plans = {_digest(bench)}
    bench.drive()
    assert bench.reasons() == ["enough"] * 2
    assert [(e.round, e.kind) for e in bench.events(ClientFailed)] == [(1, "need-plan"), (2, "need-plan")]
    assert [how for kind, _, how in carried(bench.fleet, "b") if kind == "train"] == ["digest", "whole", "whole"]


def test_another_process_holds_what_its_hello_says_and_no_more() -> None:
    holders = PlanCache({"run": {}}, "d" * 64)
    sent = SentAssignments(1, holders)
    with_it, without = Hello("a", "p1", plans=("d" * 64,)), Hello("a", "p2")
    assert holders.plan_for("a", None) == holders.plan_for("a", without) == {"run": {}}
    assert holders.plan_for("a", with_it) == "d" * 64
    assignment = Assignment("assignment-1", "toy-1", "toy", "train", {"run": {}})
    sent.remember([Envelope("a", assignment)])
    reply = ReplyHeader("assignment-1", UpdateId("toy-1", "a", 1), 0, 1)
    assert sent.envelope_to_resend(reply, restarted=False) is None
    assert holders.plan_for("a", without) == "d" * 64
    sent.envelope_to_resend(ClientConnected("a", without), restarted=False)  # the same process has kept the plan
    assert holders.plan_for("a", without) == "d" * 64
    sent.envelope_to_resend(ClientConnected("a", without), restarted=True)
    assert holders.plan_for("a", without) == {"run": {}}


def test_only_the_device_that_was_selected_gets_the_plan_again() -> None:
    holders = PlanCache({"run": {}}, "d" * 64)
    sent = SentAssignments(1, holders)
    sent.remember([Envelope("a", Assignment("assignment-1", "toy-1", "toy", "train", "d" * 64))])
    assert sent.envelope_to_resend(Failure("need-plan", "", "assignment-1", "b"), restarted=False) is None
    assert sent.envelope_to_resend(Failure("need-plan", "", "assignment-0", "a"), restarted=False) is None
    again = sent.envelope_to_resend(Failure("need-plan", "", "assignment-1", "a"), restarted=False)
    assert again is not None
    assert (again.device, again.assignment.assignment_id, again.assignment.plan) == ("a", "assignment-1", {"run": {}})
    assert sent.envelope_to_resend(Failure("need-plan", "", "assignment-1", "a"), restarted=False) is None


def four_rounds(forgets: set[int], folder: Path) -> Bench:
    devices = [scripted("a"), forgetful("b", forgets, 2.0), scripted("c")]
    return Bench(folder, devices, run={"rounds": 4}, cohort={"deadline_s": 30})


def test_a_kill_at_any_commit_changes_nothing_where_plans_are_lost_and_sent_again(tmp_path: Path) -> None:
    undisturbed = four_rounds(set(), tmp_path / "undisturbed")
    places = drive_through(undisturbed)

    def check(bench: Bench, where: str) -> None:
        assert outcome(bench) == outcome(undisturbed), where

    killed(partial(four_rounds, {2, 3}), tmp_path, places, check)


# Declined


def declining(rule: str, again: str = "") -> Script:
    return lambda assignment: Behavior(compute_s=0.0, failure=("declined", f"{rule}: so it is{again}"))


def two_slow_and(third: Script) -> list[ScriptedDevice]:
    return [scripted("a", 50.0), scripted("b", 50.0), scripted("c", third)]


def test_a_device_that_declined_is_not_selected_again_and_the_rule_stands_beside_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, two_slow_and(declining("secure")), run={"rounds": 40}, cohort={"deadline_s": 60})
    bench.drive()
    assert bench.clock.now() > 1800
    assert [e.round for e in bench.events(ClientFailed)] == [1]
    opened = bench.events(RoundOpened)
    assert {sentence(e.reasons["c"]) for e in opened[1:]} == {"declined: secure: so it is"}
    assert all("c" not in e.assignments for e in opened[1:])


@pytest.mark.parametrize("rule", ["hours", "rounds_a_day", "metered"])
def test_a_reason_that_may_have_passed_is_tried_again_after_ten_minutes(tmp_path: Path, rule: str) -> None:
    bench = Bench(tmp_path, two_slow_and(declining(rule)), run={"rounds": 20}, cohort={"deadline_s": 60})
    bench.drive()
    assigned = [(e.round, e.elapsed_s) for e in bench.events(RoundOpened) if "c" in e.assignments]
    assert [number for number, _ in assigned] == [1, 13]
    assert assigned[1][1] - assigned[0][1] >= 600


@pytest.mark.parametrize(("again_s", "left_alone_s"), [(7200, 7200), (1, 600), (999999, 90_000)])
def test_who_says_how_long_it_stays_so_is_left_alone_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: int, left_alone_s: float
) -> None:
    """A run of devices that work at night waits for the night: it does not fail for too few in the afternoon."""
    monkeypatch.setattr("thinwire.server.run.POLL_S", 5.0)  # a day of the virtual clock has 345 600 polls otherwise
    script = declining("hours", f" (again in {again_s} s)")
    bench = Bench(tmp_path, [scripted("a", script)], run={"rounds": 1}, cohort={"retry_limit": 1})
    bench.drive()
    one, two = bench.events(RoundOpened)
    assert left_alone_s <= two.elapsed_s - one.elapsed_s < left_alone_s + 60
    waited = [e.text for e in bench.events(RunStatusChanged) if e.status == "waiting"]
    first, after_a_minute = waited
    assert first == f"waiting: 0 of 1 device (a declined: hours: so it is (again in {again_s} s))"
    assert after_a_minute.startswith(f"{first}; start more clients")


def test_a_hello_that_says_something_else_lets_a_device_be_selected_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(declining("secure")), run={"rounds": 6}, cohort={"deadline_s": 60})
    same = {"link": {"rtt_s": 0.2}, "plans": ("x",)}
    said: dict[int, Any] = {2: same, 4: {**same, "versions": {"policy": "another"}}}  # at first it is what it was

    def comes_back(event: Event) -> None:
        if isinstance(event, RoundOpened) and event.round in said:
            bench.hears("c", **said[event.round])

    bench.drive(on_event=comes_back)
    assert [e.round for e in bench.events(RoundOpened) if "c" in e.assignments] == [1, 5]
    assert len(bench.events(RoundClosed)) == 6
