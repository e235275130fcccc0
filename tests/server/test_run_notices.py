"""Connected devices are notified at once that a run is over; the others learn it by their next hello."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import FAILS, SILENT, Bench, scripted, three
from thinwire.core.errors import Refused
from thinwire.core.events import Event, RoundClosed, RunStatusChanged, UpdateAccepted
from thinwire.core.owner_file import AggregatorFile
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server import command_queue
from thinwire.server.service import serve
from thinwire.simulation import Script


def over(event: Event) -> bool:
    return isinstance(event, RunStatusChanged) and event.status in ("done", "failed", "stopped")


def serves(
    bench: Bench, seconds: float, kill: Callable[[Event], bool] = lambda event: False, max_runs: int = 4
) -> list[str]:
    """One life of the service, of so many seconds or until such an event; gives who was sent a stop meanwhile.

    These seconds are virtual, so commands are read at each turn: by the machine's clock a life may take less than the
    period of reading them.
    """
    ending, until, poll = threading.Event(), bench.clock.now() + seconds, bench.fleet.poll
    before = len(bench.fleet.sent)

    def polled(wait_s: float) -> object:
        if bench.clock.now() >= until:
            ending.set()
        return poll(wait_s)

    def on_event(run_id: str, event: Event) -> None:
        if kill(event):
            raise Killed

    bench.fleet.poll = polled  # type: ignore[method-assign, assignment]  # ends the run
    with contextlib.suppress(Killed), mock.patch.object(command_queue, "COMMANDS_READ_S", 0.0):
        serve(
            bench.fleet, bench.store, bench.home, clock=bench.clock, ending=ending,
            settings=AggregatorFile(max_runs=max_runs), on_event=on_event,
        )  # fmt: skip
    bench.restart()
    return sorted(envelope.device for envelope in bench.fleet.sent[before:] if envelope.assignment.kind == "stop")


def two_rounds(folder: Path, third: Script | float = 1.0) -> Bench:
    return Bench(folder, three(third), run={"rounds": 2}, cohort={"deadline_s": 60})


def ended(bench: Bench) -> tuple[str, ...]:
    """What a device that keeps this run, and another aggregator's of the same id, is told by its next hello."""
    row = bench.store.run(bench.run_id)
    assert bench.store.roster.ended({bench.run_id: "b" * 16, "toy-99": row.identity}) == ()
    return bench.store.roster.ended({bench.run_id: row.identity})


def test_who_is_connected_at_the_end_is_notified_once(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    assert serves(bench, 100.0) == ["a", "b", "c"]
    assert serves(bench, 100.0) == []
    stops = [envelope.assignment for envelope in bench.fleet.sent if envelope.assignment.kind == "stop"]
    assert {stop.identity for stop in stops} == {bench.store.run(bench.run_id).identity}
    assert not any(device.outbox for device in bench.fleet.devices.values())


@pytest.mark.parametrize("rounds", ["done", "failed"])
def test_after_a_kill_between_the_last_status_and_the_notices_a_hello_learns_the_end(
    tmp_path: Path, rounds: str
) -> None:
    bench = two_rounds(tmp_path)
    if rounds == "failed":
        bench = Bench(tmp_path / "failed", [scripted("a", lambda assignment: FAILS)], cohort={"retry_limit": 0})
    assert ended(bench) == ()
    assert serves(bench, 1000.0, kill=over) == []
    assert bench.store.run(bench.run_id).status == rounds
    assert serves(bench, 100.0) == []
    assert ended(bench) == (bench.run_id,)


@pytest.mark.parametrize("comes", [True, False])
def test_who_registers_just_before_the_end_is_notified_and_who_comes_later_learns_it_by_its_hello(
    tmp_path: Path, comes: bool
) -> None:
    bench = two_rounds(tmp_path)
    bench.fleet.crash("c", 1.5)

    def arrives(event: Event) -> bool:
        if over(event) and comes:
            bench.fleet.connect("c")
        return False

    assert serves(bench, 600.0, arrives) == (["a", "b", "c"] if comes else ["a", "b"])
    assert ended(bench) == (bench.run_id,)


@pytest.mark.parametrize("error", [None, RuntimeError("a defect"), Refused("a reason")])
def test_a_run_that_is_over_leaves_nothing_in_the_spool(tmp_path: Path, error: Exception | None) -> None:
    """Neither the updates of a round that it did not close, nor what is here of an upload that was cut."""
    bench = two_rounds(tmp_path)
    cut = bench.fleet.spool.partial(UpdateId(bench.run_id, "c", 9), "ab" * 32)
    spooled = list[ReplyHeader]()

    def fails(event: Event) -> bool:
        if isinstance(event, UpdateAccepted) and event.round == 2:
            spooled.extend(bench.fleet.spool.headers())
            if error is not None:
                raise error
        return False

    assert serves(bench, 600.0, fails) == ["a", "b", "c"]
    assert bench.store.run(bench.run_id).status == ("failed" if error else "done")
    assert spooled
    assert not bench.fleet.spool.headers()
    assert not cut.exists()


def test_a_run_that_ends_by_a_defect_is_over_for_its_devices_too(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    bench.fleet.crash("c", 1.5)

    def defect(event: Event) -> bool:
        if isinstance(event, RoundClosed) and event.round == 2:
            raise RuntimeError("a defect")
        return False

    assert serves(bench, 600.0, defect) == ["a", "b"]
    assert bench.store.run(bench.run_id).status == "failed"
    assert ended(bench) == (bench.run_id,)


def without_a_model(folder: Path) -> Bench:
    """Nobody can give the first model; d comes after the run has failed."""
    devices = [scripted(name, lambda assignment: FAILS) for name in ("a", "b", "c", "d")]
    bench = Bench(folder, devices, run={"init": "device"}, cohort={"wait_for": 3})
    bench.fleet.crash("d")
    bench.fleet.connect("d", 50.0)
    return bench


def test_who_was_requested_a_first_model_hears_that_there_will_be_none(tmp_path: Path) -> None:
    bench = without_a_model(tmp_path)
    assert serves(bench, 100.0) == ["a", "b", "c"]
    assert bench.store.run(bench.run_id).status == "failed"
    assert serves(bench, 100.0) == []


def test_who_is_requested_a_first_model_is_not_renamed_meanwhile(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a", lambda assignment: SILENT)], run={"init": "device"})
    serves(bench, 10.0)
    assert bench.store.run(bench.run_id).status == "running"
    bench.store.roster.enrol("a", "a-print", b"a", "manual")
    with pytest.raises(Refused, match="may take part in"):
        bench.store.roster.rename("a", "z")
