"""What it costs to look for replacements, and for who is gone, counted: a round does so at every event while answers
lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, KeysView
from pathlib import Path

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import Bench, killing, scripted
from thinwire.core.events import ClientFailed, ClientSelected, Event, RoundOpened
from thinwire.core.fleet import Hello
from thinwire.core.types import Assignment
from thinwire.server import round_events
from thinwire.server.context import RECONNECT_S
from thinwire.server.policy.eligibility import ConnectedDevices, Eligibility
from thinwire.server.round_runner import RoundRunner
from thinwire.simulation import Behavior


class Counted(dict[str, Hello]):
    """Counts how often all who are there are gone through."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # a dict has its own class
        self.times += 1
        return super().keys()


def declining(assignment: Assignment) -> Behavior:
    return Behavior(compute_s=0.0, failure=("declined", "hours: at night (again in 7200 s)"))


def test_a_round_that_lacks_an_answer_does_not_go_through_all_who_are_there_at_each_event(tmp_path: Path) -> None:
    devices = [scripted(f"d{i:02}", 1.0 + i / 10) for i in range(40)]
    bench = Bench(tmp_path, devices, run={"rounds": 1, "evaluate": "off"}, cohort={"deadline_s": 60})
    bench.fleet.crash("d39", 0.5)
    there = Counted()
    bench.drive(online=ConnectedDevices(there))
    assert [event.device for event in bench.events(ClientFailed)] == ["d39"]
    assert there.times < 10, "39 answers came and were aggregated while nobody could take its place"


def test_who_is_barred_is_not_looked_at_again_at_each_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [scripted(f"d{i:02}", declining if i < 20 else 1.0 + i / 10) for i in range(40)]
    bench = Bench(tmp_path, devices, run={"rounds": 2, "evaluate": "off"}, cohort={"deadline_s": 60})
    looks, reason, opened = Counter[str](), Eligibility.reason, list[RoundOpened]()

    def counted(eligibility: Eligibility, device: str) -> str:
        looks[device] += len(opened) == 2
        return reason(eligibility, device)

    def lose(event: Event) -> None:
        if isinstance(event, RoundOpened):
            opened.append(event)
            if event.round == 2:
                bench.fleet.crash("d39", 0.5)

    monkeypatch.setattr(Eligibility, "reason", counted)
    bench.drive(on_event=lose)
    assert [len(event.assignments) for event in bench.events(RoundOpened)] == [40, 20]
    assert bench.events(ClientFailed)[-1].device == "d39"
    assert 1 <= looks["d00"] < 5, "19 answers came and were aggregated while nobody could take d39's place"


def test_who_does_not_come_back_after_a_restart_is_missed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(
        tmp_path,
        [scripted("a", 2 * RECONNECT_S), scripted("b", 3 * RECONNECT_S), scripted("c", 4 * RECONNECT_S)],
        run={"rounds": 1, "evaluate": "off"},
        cohort={"deadline_s": 5 * RECONNECT_S},
    )
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, ClientSelected) and event.device == "c"))
    bench.fleet.crash("c")
    bench.fleet.poll(0.0)
    bench.restart()
    missed, act = list[round_events.DeviceDisconnected](), RoundRunner._act

    def told(one: RoundRunner, event: round_events.Input) -> None:
        missed.extend([event] if isinstance(event, round_events.DeviceDisconnected) else [])
        act(one, event)

    monkeypatch.setattr(RoundRunner, "_act", told)
    bench.drive()
    assert [event.device for event in bench.events(ClientFailed)] == ["c"]
    assert missed == [round_events.DeviceDisconnected("c", "did not come back")]
