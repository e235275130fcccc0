"""A device is revoked in the middle of a round: its assignment is refused, what is aggregated stays, what is not is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import SILENT, Bench, killing, scripted
from thinwire.core.events import ClientFailed, Event, RoundClosed, UpdateAccepted, UpdateAggregated, UpdateDropped
from thinwire.core.types import UpdateId
from thinwire.server import round_runner
from thinwire.server.command_queue import CommandQueue
from thinwire.server.context import RECONNECT_S
from thinwire.server.recording_fleet import RecordingFleet
from thinwire.server.round_close import AggregationQueue
from thinwire.simulation import Behavior, Script
from thinwire.store import RunRow


def hold_up(monkeypatch: pytest.MonkeyPatch, held: Callable[[UpdateId], bool], then: Callable[[], None]) -> None:
    """The addition of such an update never starts; `then` is done instead."""
    begin = AggregationQueue.begin

    def stuck(self: AggregationQueue, update_id: UpdateId, add: Callable[[], None]) -> None:
        if held(update_id):
            self._begun[update_id] = Future()
            then()
        else:
            begin(self, update_id, add)

    monkeypatch.setattr(round_runner, "AGGREGATION_WAIT_S", 0.0)
    monkeypatch.setattr(AggregationQueue, "begin", stuck)


@pytest.fixture(autouse=True)
def commands_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.server.command_queue.COMMANDS_READ_S", 0.0)


class Revoking(Bench):
    """A run of three devices, all in the roster; `revoke` is what the command line does."""

    def __init__(self, folder: Path, third: Script | float = 1.0) -> None:
        devices = [scripted("a"), scripted("b", 2.0), scripted("c", third)]
        super().__init__(folder, devices, run={"rounds": 3}, cohort={"deadline_s": 30})
        for device in devices:
            self.store.roster.enrol(device.name, device.name * 64, device.name.encode(), "loopback")
        self.command_id = 0

    def revoke(self, device: str) -> None:
        self.command_id = self.store.revoke_device(device, "ann", "", lambda: True) or 0

    def go(self, on_event: Callable[[Event], None] = lambda event: None) -> RunRow:
        commands = CommandQueue(self.store.commands)
        fleet = self.fleet
        self.fleet = RecordingFleet(fleet, self.store, self.clock, commands)  # type: ignore[assignment]  # as the service
        try:
            return self.drive(on_event=on_event)
        finally:
            self.fleet.poll(0.0)
            self.fleet = fleet

    def once(self, wanted: Callable[[Event], bool], act: Callable[[], None]) -> Callable[[Event], None]:
        """Act at the first such event."""
        done: list[bool] = []

        def on_event(event: Event) -> None:
            if not done and wanted(event):
                done.append(True)
                act()

        return on_event


def test_the_open_assignment_ends_refused_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    bench = Revoking(tmp_path, lambda assignment: SILENT if assignment.round == 2 else Behavior())
    heard = bench.once(lambda e: isinstance(e, UpdateAccepted) and e.round == 2, lambda: bench.revoke("c"))
    row = bench.go(heard)
    assert (row.status, bench.reasons()) == ("done", ["all", "enough", "all"])
    lost = [(e.round, e.device, e.kind, e.text) for e in bench.events(ClientFailed)]
    assert lost == [(2, "c", "refused", "revoked")]
    assert bench.store.commands.result(bench.command_id) == {"done": True, "rounds": {bench.run_id: [1]}}
    assert bench.clock.now() < 30, "nobody waited for the deadline"


def test_a_command_revokes_the_key_that_it_is_about_also_where_its_name_has_gone_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Revoking(tmp_path)
    fleet = RecordingFleet(bench.fleet, bench.store, bench.clock, CommandQueue(bench.store.commands))
    bench.revoke("c")
    bench.store.roster.rename("c", "old-c")
    bench.store.roster.enrol("c", "d" * 64, b"d", "loopback")
    revoked = list[str]()
    monkeypatch.setattr(bench.fleet, "revoke_access", revoked.extend)
    fleet.poll(0.0)
    fleet.poll(0.0)
    assert (revoked, bench.store.commands.result(bench.command_id)) == (["old-c"], {"done": True, "rounds": {}})


def test_what_is_aggregated_stays_and_the_command_says_in_which_rounds(tmp_path: Path) -> None:
    bench = Revoking(tmp_path)
    heard = bench.once(
        lambda e: isinstance(e, UpdateAccepted) and e.round == 2 and e.device == "b", lambda: bench.revoke("c")
    )
    bench.go(heard)
    aggregated = [update for e in bench.events(RoundClosed) for update in e.aggregated if "/c/" in update]
    assert len(aggregated) == 2
    assert bench.store.commands.result(bench.command_id) == {"done": True, "rounds": {bench.run_id: [1, 2]}}


def test_what_came_and_is_not_aggregated_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addition is held up until the command was given."""
    bench = Revoking(tmp_path)
    hold_up(monkeypatch, lambda u: (u.device, u.sequence) == ("c", 2), lambda: bench.revoke("c"))
    row = bench.go()
    assert row.status == "done"
    assert [(e.round, e.device, e.reason) for e in bench.events(UpdateDropped)] == [(2, "c", "revoked")]
    assert bench.store.commands.result(bench.command_id) == {"done": True, "rounds": {bench.run_id: [1]}}


def test_a_device_revoked_while_the_aggregator_was_down_is_out_before_its_answer_is_aggregated(tmp_path: Path) -> None:
    bench = Revoking(tmp_path)
    with pytest.raises(Killed):
        bench.go(killing(lambda e: isinstance(e, UpdateAccepted) and e.round == 2 and e.device == "c"))
    bench.store.roster.revoke("c")
    bench.restart()
    row = bench.go()
    assert row.status == "done"
    assert [(e.round, e.device, e.reason) for e in bench.events(UpdateDropped)] == [(2, "c", "revoked")]
    assert not [u for e in bench.events(RoundClosed) if e.round > 1 for u in e.aggregated if "/c/" in u]
    assert not [header for header in bench.fleet.spool.headers() if header.update_id.device == "c"]


def test_what_was_dropped_stays_so_where_its_device_is_approved_again_while_the_aggregator_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Revoking(tmp_path)
    hold_up(
        monkeypatch, lambda u: not bench.command_id and (u.device, u.sequence) == ("c", 2), lambda: bench.revoke("c")
    )
    with pytest.raises(Killed):
        bench.go(killing(lambda e: isinstance(e, UpdateDropped)))
    bench.store.roster.approve("c")
    bench.restart()
    assert bench.go().status == "done"
    (dropped,) = bench.events(UpdateDropped)
    assert (dropped.update_id, dropped.reason) == ("toy-1/c/2", "revoked")
    closed = bench.events(RoundClosed)[1]
    assert (closed.aggregated, closed.dropped) == (["toy-1/a/2", "toy-1/b/2"], ["toy-1/c/2"])


def test_nobody_waits_for_a_device_to_come_back_that_was_revoked_while_the_aggregator_was_down(tmp_path: Path) -> None:
    bench = Revoking(tmp_path)
    with pytest.raises(Killed):
        bench.go(killing(lambda e: isinstance(e, RoundClosed)))
    began = bench.clock.now()
    bench.store.roster.revoke("c")
    bench.fleet.crash("c")
    bench.fleet.poll(0.0)
    bench.restart()
    assert bench.go().status == "done"
    assert bench.clock.now() - began < RECONNECT_S


def test_what_was_recorded_as_aggregated_before_a_kill_stays_after_it(tmp_path: Path) -> None:
    bench = Revoking(tmp_path)

    def on_event(event: Event) -> None:
        if isinstance(event, UpdateAggregated) and event.round == 2 and event.update_id.split("/")[1] == "c":
            bench.store.roster.revoke("c")
            raise Killed

    with pytest.raises(Killed):
        bench.go(on_event)
    bench.restart()
    assert bench.go().status == "done"
    aggregated = {e.round: [u for u in e.aggregated if "/c/" in u] for e in bench.events(RoundClosed)}
    assert [len(aggregated[number]) for number in (1, 2, 3)] == [1, 1, 0]
