"""Who failed in a way that would come again is left alone until it says something else of itself, restart or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import REPORT, Bench, killing, three
from thinwire.core.equipment import Equipment
from thinwire.core.events import ClientFailed, Event, RoundClosed, RoundOpened
from thinwire.core.fleet import ClientConnected, Hello
from thinwire.core.types import Assignment
from thinwire.server.policy.eligibility import MAX_REASON, ConnectedDevices, DeviceBackoff
from thinwire.simulation import Behavior
from thinwire.store.journal import from_json, to_json

HELLO = Hello("c", "c-0", (REPORT,), {"python": "3.13", "thinwire": "0.1"}, has=Equipment(4, 2**32, 2**31))
DECLINED = Behavior(compute_s=0.0, failure=("declined", "tasks: not this one"))


def closing(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, RoundClosed) and event.round == number


def opened(bench: Bench) -> list[tuple[list[str], int]]:
    """Of each round whom it selected, and its floor."""
    return [(sorted(event.assignments), event.min_updates) for event in bench.events(RoundOpened)]


def declining(folder: Path) -> Bench:
    return Bench(folder, three(lambda assignment: DECLINED), run={"rounds": 4}, cohort={"deadline_s": 60})


def test_who_declined_for_good_is_not_selected_again_after_a_restart(tmp_path: Path) -> None:
    undisturbed = declining(tmp_path / "undisturbed")
    undisturbed.drive()
    assert opened(undisturbed) == [(["a", "b", "c"], 2), *[(["a", "b"], 1)] * 3]
    for number in (1, 2, 3):
        bench = declining(tmp_path / f"killed-{number}")
        with pytest.raises(Killed):
            bench.drive(on_event=killing(closing(number)))
        bench.restart()
        bench.drive()
        assert opened(bench) == opened(undisturbed), f"killed at the end of round {number}"


@pytest.mark.parametrize("kill", [False, True])
def test_who_was_restarted_is_selected_again(tmp_path: Path, kill: bool) -> None:
    def script(assignment: Assignment) -> Behavior:
        return DECLINED if assignment.round == 1 else Behavior()

    bench = Bench(tmp_path, three(script), run={"rounds": 4}, cohort={"deadline_s": 60})

    def on_event(event: Event) -> None:
        if closing(2)(event):
            bench.fleet.crash("c")
            bench.fleet.connect("c")
            if kill:
                raise Killed

    if kill:
        with pytest.raises(Killed):
            bench.drive(on_event=on_event)
        bench.restart()
        bench.drive()
    else:
        bench.drive(on_event=on_event)
    assert [event.device for event in bench.events(ClientFailed)] == ["c"]
    assert "c" not in opened(bench)[1][0]
    assert "c" in opened(bench)[3][0]


def test_a_new_aggregator_finds_the_same_digest_of_what_bears_on_what_a_device_can_do() -> None:
    def said(hello: Hello) -> str:
        online = ConnectedDevices()
        assert online.report_digest("c") == ""
        online.apply(ClientConnected("c", hello))
        return online.report_digest("c")

    turned = replace(
        HELLO, versions=dict(sorted(HELLO.versions.items(), reverse=True)), link={"rtt_s": 2.0}, plans=("d",)
    )
    assert said(HELLO) == said(turned) == said(replace(HELLO, has=replace(HELLO.has, free_bytes=1)))
    assert len({said(HELLO), said(replace(HELLO, process="c-1")), said(replace(HELLO, tasks=()))}) == 3


def test_a_digest_follows_what_is_said() -> None:
    online = ConnectedDevices()
    online.apply(ClientConnected("c", HELLO))
    before = online.report_digest("c")
    online.apply(ClientConnected("c", replace(HELLO, process="c-1")))
    assert online.report_digest("c") != before


def test_an_older_journal_is_read_and_bars_nobody_who_says_hello() -> None:
    raw = to_json(ClientFailed(1.0, 1, "c", "run.1.c", "declined", "tasks: not this one", 0.0))
    del raw["report_digest"]
    event = from_json(raw)
    assert isinstance(event, ClientFailed)
    barred = DeviceBackoff()
    barred.failed(event)
    assert barred.reason("c", 1.0, lambda device: "a digest") == ""


def test_why_a_device_is_barred_is_said_in_words():
    barred = DeviceBackoff()
    barred.failed(
        ClientFailed(1.0, 1, "c", "run.1.c", "task-missing", "no such task on this device", 0.0, report_digest="x")
    )
    barred.failed(ClientFailed(1.0, 1, "d", "run.1.d", "declined", "tasks: not this one", 0.0, report_digest="x"))
    assert {device: barred.reason(device, 1.0, lambda device: "x") for device in "abcd"} == {
        "a": "",
        "b": "",
        "c": "reported that it has no such task",
        "d": "declined: tasks: not this one",
    }


def test_the_reason_for_a_failure_is_one_short_line_since_the_journal_repeats_it():
    barred = DeviceBackoff()
    barred.failed(
        ClientFailed(1.0, 1, "c", "run.1.c", "protocol", "\n\x1b[2J" + "\U0001f600" * 2000, 0.0, report_digest="x")
    )
    reason = barred.reason("c", 1.0, lambda device: "x")
    assert len(reason) == MAX_REASON
    assert reason.startswith("protocol: ??[2J")
