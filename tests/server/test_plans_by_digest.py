"""A device is sent the plan once; who has lost it gets it again within the round, and nobody counts that against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server.scripted import REPORT, Device, ScriptedFleet
from tests.server.test_run import Bench, drive_killed_at, outcome, three
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.core.fleet import Envelope, Hello, NodeJoined
from thinwire.core.types import Ask, Failure, ReplyHead, UpdateId
from thinwire.server.holders import Holders


class Forgetful(Device):
    """Loses its plans at each of these rounds, the first time that it is asked."""

    def __init__(self, name: str, rounds: set[int], **more: float) -> None:
        super().__init__(name, lambda ask: more.get("after_s", 1.0))
        self.rounds = rounds

    def take(self, ask: Ask) -> float | Failure | None:
        if ask.round in self.rounds and ask.kind == "train" and isinstance(ask.plan, str):
            self.plans.clear()
        return super().take(ask)


def carried(fleet: ScriptedFleet, device: str) -> list[tuple[str, int, str]]:
    """(kind, round, how the plan went) of everything that was sent to a device."""
    return [
        (e.ask.kind, e.ask.round, "digest" if isinstance(e.ask.plan, str) else "whole")
        for e in fleet.sent
        if e.device == device
    ]


def test_a_device_that_answered_with_the_whole_plan_is_sent_the_digest_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [Device("a")], run={"rounds": 3})
    bench.drive()
    assert carried(bench.fleet, "a") == [
        ("train", 1, "whole"), ("train", 2, "digest"), ("train", 3, "digest"), ("evaluate", 3, "digest"),
        ("stop", 3, "digest"),
    ]  # fmt: skip


def test_a_device_that_failed_may_not_have_kept_the_plan(tmp_path: Path) -> None:
    fails: Callable[[Ask], float | Failure] = lambda ask: Failure("task-error", "x", "") if ask.round == 1 else 1.0  # noqa: E731
    bench = Bench(tmp_path, [Device("a"), Device("b", fails)], run={"rounds": 3})
    bench.drive()
    assert [how for kind, _, how in carried(bench.fleet, "b") if kind == "train"] == ["whole", "whole", "digest"]


def test_a_hello_says_who_holds_the_plan_already(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [Device("a")], run={"rounds": 1})
    device = Device("a", plans={_digest(bench)})
    bench.fleet = ScriptedFleet(bench.clock, [device])
    bench.drive()
    assert {how for _, _, how in carried(bench.fleet, "a")} == {"digest"}


def _digest(bench: Bench) -> str:
    return RunPlan.from_json(bench.store.run(bench.run_id).plan).digest


def test_who_has_lost_the_plan_gets_it_with_the_same_ask_and_has_not_failed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [Device("a"), Forgetful("b", {2})], run={"rounds": 3})
    row = bench.drive()
    assert (row.status, bench.reasons()) == ("done", ["all"] * 3)
    assert bench.events(ClientFailed) == []
    asks = [e.ask for e in bench.fleet.sent if e.device == "b" and e.ask.round == 2]
    assert len({ask.ask_id for ask in asks}) == 1
    first, again = asks
    assert isinstance(first.plan, str)
    assert again == replace(first, plan=again.plan)
    assert [how for kind, _, how in carried(bench.fleet, "b") if kind == "train"] == [
        "whole", "digest", "whole", "digest",
    ]  # fmt: skip


def test_who_asks_for_the_plan_again_and_again_gets_it_once_and_has_then_failed(tmp_path: Path) -> None:
    never: Callable[[Ask], Failure] = lambda ask: Failure("need-plan", "", "")  # noqa: E731
    bench = Bench(tmp_path, [Device("a"), Device("b", never)], run={"rounds": 2})
    bench.fleet.devices[1].plans = {_digest(bench)}
    bench.fleet = ScriptedFleet(bench.clock, bench.fleet.devices)
    bench.drive()
    assert bench.reasons() == ["enough"] * 2
    assert [(e.round, e.kind) for e in bench.events(ClientFailed)] == [(1, "need-plan"), (2, "need-plan")]
    assert [how for kind, _, how in carried(bench.fleet, "b") if kind == "train"] == ["digest", "whole", "whole"]


def test_another_process_holds_what_its_hello_says_and_no_more() -> None:
    holders = Holders({"run": {}}, "d" * 64)
    with_it, without = Hello("a", "p1", plans=("d" * 64,)), Hello("a", "p2")
    assert holders.plan_for("a", None) == holders.plan_for("a", without) == {"run": {}}
    assert holders.plan_for("a", with_it) == "d" * 64
    ask = Ask("ask-1", "toy-1", "toy", "train", {"run": {}})
    holders.asked([Envelope("a", ask)])
    assert holders.take(ReplyHead("ask-1", UpdateId("toy-1", "a", 1), 0, 1), anew=False) is None
    assert holders.plan_for("a", without) == "d" * 64
    holders.take(NodeJoined("a", without), anew=False)  # the same process again: it has kept what it had
    assert holders.plan_for("a", without) == "d" * 64
    holders.take(NodeJoined("a", without), anew=True)
    assert holders.plan_for("a", without) == {"run": {}}


def test_only_the_device_that_was_asked_gets_the_plan_again() -> None:
    holders = Holders({"run": {}}, "d" * 64)
    holders.asked([Envelope("a", Ask("ask-1", "toy-1", "toy", "train", "d" * 64))])
    assert holders.take(Failure("need-plan", "", "ask-1", "b"), anew=False) is None
    assert holders.take(Failure("need-plan", "", "ask-0", "a"), anew=False) is None
    again = holders.take(Failure("need-plan", "", "ask-1", "a"), anew=False)
    assert again is not None
    assert (again.device, again.ask.ask_id, again.ask.plan) == ("a", "ask-1", {"run": {}})
    assert holders.take(Failure("need-plan", "", "ask-1", "a"), anew=False) is None


def killed_at(folder: Path, at: int, before: bool, forgets: set[int]) -> tuple[Bench, int]:
    devices = [Device("a"), Forgetful("b", forgets, after_s=2.0), Device("c")]
    bench = Bench(folder, devices, run={"rounds": 4}, cohort={"deadline_s": 30})
    return bench, drive_killed_at(bench, at, before)


def test_a_kill_at_any_commit_changes_nothing_where_plans_are_lost_and_sent_again(tmp_path: Path) -> None:
    undisturbed, commits = killed_at(tmp_path / "undisturbed", 0, False, set())
    for at in range(1, commits + 1):
        for before in (True, False):
            bench, _ = killed_at(tmp_path / f"{at}-{before}", at, before, {2, 3})
            assert outcome(bench) == outcome(undisturbed), f"killed {'before' if before else 'after'} commit {at}"
            bench.store.close()


# Declined


def declining(rule: str, again: str = "") -> Callable[[Ask], float | Failure]:
    return lambda ask: Failure("declined", f"{rule}: so it is{again}", "")


def test_a_device_that_declined_is_not_asked_again_and_the_rule_stands_beside_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(declining("secure")), run={"rounds": 40}, cohort={"deadline_s": 60})
    for device in bench.fleet.devices[:2]:
        device.script = lambda ask: 50.0
    bench.drive()
    assert bench.clock.now() > 1800
    assert [e.round for e in bench.events(ClientFailed)] == [1]
    opened = bench.events(RoundOpened)
    assert {e.reasons.get("c") for e in opened[1:]} == {"declined: secure: so it is"}
    assert all("c" not in e.asks for e in opened[1:])


@pytest.mark.parametrize("rule", ["hours", "rounds_a_day", "metered"])
def test_a_reason_that_may_have_passed_is_tried_again_after_ten_minutes(tmp_path: Path, rule: str) -> None:
    bench = Bench(tmp_path, three(declining(rule)), run={"rounds": 20}, cohort={"deadline_s": 60})
    for device in bench.fleet.devices[:2]:
        device.script = lambda ask: 50.0
    bench.drive()
    asked = [(e.round, e.elapsed_s) for e in bench.events(RoundOpened) if "c" in e.asks]
    assert [number for number, _ in asked] == [1, 13]
    assert asked[1][1] - asked[0][1] >= 600


@pytest.mark.parametrize(("again_s", "left_alone_s"), [(7200, 7200), (1, 600), (999999, 90_000)])
def test_who_says_how_long_it_stays_so_is_left_alone_for_so_long(
    tmp_path: Path, again_s: int, left_alone_s: float
) -> None:
    """A run of devices that work at night waits for the night: it does not fail for too few in the afternoon."""
    script = declining("hours", f" (again in {again_s} s)")
    bench = Bench(tmp_path, [Device("a", script)], run={"rounds": 1}, cohort={"retry_limit": 1})
    bench.drive()
    one, two = bench.events(RoundOpened)
    assert left_alone_s <= two.elapsed_s - one.elapsed_s < left_alone_s + 60
    waited = [e.text for e in bench.events(RunStatusChanged) if e.status == "waiting"]
    assert waited == [f"waiting: 0 of 1 devices (a declined: hours: so it is (again in {again_s} s))"]


def test_a_hello_that_says_something_else_lets_a_device_be_asked_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(declining("secure")), run={"rounds": 6}, cohort={"deadline_s": 60})
    same = Hello("c", "p1", (REPORT,), link={"rtt_s": 0.2}, plans=("x",))
    bench.fleet.later(1.5, NodeJoined("c", same))  # it came back, and is what it was
    bench.fleet.later(3.5, NodeJoined("c", replace(same, versions={"policy": "another"})))
    bench.drive()
    assert [e.round for e in bench.events(RoundOpened) if "c" in e.asks] == [1, 5]
    assert len(bench.events(RoundClosed)) == 6
