"""The fleet on a virtual clock keeps the laws of every fleet, and does what its script says."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.faulty_fleet import FaultyBehavior, FaultyFleet
from tests.support.fleet_laws import FleetLaws
from tests.support.fleet_words import envelope
from thinwire.core import Layout, VirtualClock
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Link
from thinwire.core.plan_values import MAX_DELAY
from thinwire.core.types import Assignment, Failure, ReplyHeader, UpdateId, UpdateOutcome
from thinwire.simulation import Behavior, LogNormal, RandomScript, ScriptedDevice, ScriptedFleet, SyntheticUpdates
from thinwire.simulation.local_fleet import LocalLink
from thinwire.simulation.storage import InMemorySpool
from thinwire.store import FileSpool, Store

LAYOUT = Layout.of({"w": (3, 2)})


class ScriptedSetting:
    """A ScriptedFleet on the real spool; a restart is a new fleet over the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store.open(folder / "store.sqlite3")
        self.roster, self.spool = self.store.roster, FileSpool(folder / "spool")
        self.fleet = ScriptedFleet(self.spool, VirtualClock())

    def link(self, name: str) -> Link:
        return LocalLink(self.fleet, name)

    def restart(self) -> None:
        self.spool = FileSpool(self.folder / "spool")
        self.fleet = self.fleet.restart(self.spool)


class TestScriptedFleet(FleetLaws):
    @contextlib.contextmanager
    def make(self, folder: Path) -> Iterator[ScriptedSetting]:
        setting = ScriptedSetting(folder)
        yield setting
        setting.store.close()


class Stage:
    """One fleet, and what arrived when."""

    def __init__(self, folder: Path, *devices: ScriptedDevice, grace_s: float = 0.0) -> None:
        self.folder, self.clock = folder, VirtualClock()
        self.fleet = FaultyFleet(InMemorySpool(folder / "spool"), self.clock, None, devices, grace_s)

    def assign(self, device: str, assignment_id: str, *bodies: bytes) -> None:
        self.fleet.send([envelope(device, assignment_id, self.folder, *bodies)])

    def until(self, at: float) -> list[tuple[float, Arrival]]:
        found = []
        while self.clock.now() < at:
            arrivals = self.fleet.poll(at - self.clock.now())
            found += [(round(self.clock.now(), 6), arrival) for arrival in arrivals]
        return found


def device(behavior: Behavior, **more: object) -> ScriptedDevice:
    return ScriptedDevice("pi-1", SyntheticUpdates("pi-1", LAYOUT, 0.5), lambda assignment: behavior, **more)  # type: ignore[arg-type]  # tests vary it


def test_an_answer_comes_after_its_stages_and_says_how_long_they_took(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(Behavior(1.0, 5.0, 0.5, upload_s=lambda size: size / 10)))
    stage.assign("pi-1", "run.1.pi-1", b"model")
    (_, joined), (at, header) = stage.until(100.0)
    assert isinstance(joined, ClientConnected) and isinstance(header, ReplyHeader)
    size = header.payload_bytes
    assert at == pytest.approx(6.5 + size / 10)
    assert (header.timings.download_s, header.timings.train_s, header.timings.encode_s) == (1.0, 5.0, 0.5)
    assert header.transfer is not None
    assert header.transfer.arrived_at - header.transfer.began_at == pytest.approx(size / 10)
    frame = b"".join(stage.fleet.open(header.update_id))
    assert np.frombuffer(frame[-24:], "<f4").tolist() == [0.5] * 6, "identity sends the change as it is"


def test_what_is_lost_is_there_again_when_the_device_is_back(tmp_path: Path) -> None:
    for lost, at in (("assignment", 20.0 + 3.0 + 1.0), ("reply", 20.0 + 1.0)):
        stage = Stage(tmp_path, device(Behavior(compute_s=3.0, upload_s=1.0, lost=lost), offline=[(10.0, 20.0)]))  # type: ignore[arg-type]  # of the literals
        stage.assign("pi-1", "run.1.pi-1")
        assert [(t, type(a)) for t, a in stage.until(50.0)] == [
            (0.0, ClientConnected), (10.0, ClientDisconnected), (20.0, ClientConnected), (at, ReplyHeader),
        ]  # fmt: skip


def test_who_dies_at_work_begins_again_and_who_is_back_soon_was_never_gone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(Behavior(compute_s=4.0), offline=[(3.0, 5.0)]), grace_s=10.0)
    stage.assign("pi-1", "run.1.pi-1")
    assert [(t, type(a)) for t, a in stage.until(50.0)] == [
        (0.0, ClientConnected),
        (5.0, ClientConnected),
        (9.0, ReplyHeader),
    ]


def test_a_withdrawn_assignment_is_not_answered(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(Behavior(compute_s=4.0)))
    stage.assign("pi-1", "run.1.pi-1")
    stage.until(2.0)
    stage.fleet.cancel(["run.1.pi-1"])
    assert stage.until(20.0) == []


def test_who_is_revoked_at_work_is_gone_and_says_nothing_more(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(Behavior(compute_s=4.0)))
    stage.assign("pi-1", "run.1.pi-1")
    stage.until(2.0)
    stage.fleet.revoke_access(["pi-1"])
    assert [(t, type(a)) for t, a in stage.until(20.0)] == [(2.0, Failure), (2.0, ClientDisconnected)]
    stage.fleet = stage.fleet.restart()
    assert stage.until(30.0) == []


def test_a_held_answer_leaves_when_a_later_round_is_selected(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(FaultyBehavior(compute_s=1.0, upload_s=2.0, held=1)))
    stage.assign("pi-1", "run.1.pi-1")
    stage.until(30.0)
    sent = envelope("pi-2", "run.2.pi-2")
    stage.fleet.send([type(sent)("pi-2", type(sent.assignment)(**{**vars(sent.assignment), "round": 2}))])
    assert [(t, a.assignment_id) for t, a in stage.until(50.0) if isinstance(a, ReplyHeader)] == [(32.0, "run.1.pi-1")]


def test_what_is_sent_once_more(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(FaultyBehavior(again=("same", "new", "changed"))))
    stage.assign("pi-1", "run.1.pi-1")
    _, first, second, lost = (arrival for _, arrival in stage.until(5.0))
    assert isinstance(first, ReplyHeader) and isinstance(second, ReplyHeader) and isinstance(lost, Failure)
    assert (first.assignment_id, first.update_id.sequence) == ("run.1.pi-1", 1)
    assert (second.assignment_id, second.update_id.sequence, lost.kind) == ("run.1.pi-1", 2, "state-lost")


def test_a_failure_comes_when_its_work_is_over_and_the_next_assignment_is_delivered(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(Behavior(compute_s=2.0, failure=("task-error", "x"))))
    stage.assign("pi-1", "one")
    stage.assign("pi-1", "two")
    found = [(t, a.assignment_id) for t, a in stage.until(9.0) if isinstance(a, Failure)]
    assert found == [(2.0, "one"), (4.0, "two")]


def test_no_time_passes_for_devices_while_the_aggregator_is_dead(tmp_path: Path) -> None:
    stage = Stage(tmp_path, device(Behavior(compute_s=4.0)))
    stage.assign("pi-1", "run.1.pi-1")
    stage.until(3.0)
    stage.fleet = stage.fleet.restart()
    stage.assign("pi-1", "run.1.pi-1")
    assert [(t, type(a)) for t, a in stage.until(9.0)] == [(3.0, ClientConnected), (4.0, ReplyHeader)]


def test_a_pace_is_drawn_for_each_assignment_and_is_the_same_each_time(tmp_path: Path) -> None:
    assignments = [envelope("a", f"run.{i}.a", tmp_path, b"1234").assignment for i in range(400)]
    script = RandomScript(
        7, compute=LogNormal(10.0, 0.5), down_bytes_s=2.0, up_bytes_s=4.0, lost_assignments=0.25, failing=0.25
    )
    behaviors = [script(assignment) for assignment in assignments]
    assert [(t.compute_s, t.lost, t.failure) for t in behaviors] == [
        (t.compute_s, t.lost, t.failure) for t in map(script, assignments)
    ]
    assert {(t.download_s, t.sending_s(8)) for t in behaviors} == {(2.0, 2.0)}
    assert 8.0 < sorted(t.compute_s for t in behaviors)[200] < 12.5
    assert 60 < sum(t.lost == "assignment" for t in behaviors) < 140
    assert 60 < sum(t.failure is not None for t in behaviors) < 140


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/how/run-experiments.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ScriptedFleet" in block)
    monkeypatch.chdir(tmp_path)
    said: list[list[tuple[str, int]]] = []
    exec(example, {"print": said.append})
    (rounds,) = said
    assert {reason for reason, _ in rounds} == {"all"}
    assert len(rounds) == 20 and all(5 < seconds < 200 for _, seconds in rounds)


def test_a_device_keeps_as_much_after_many_assignments_as_after_a_few() -> None:
    one = device(Behavior(lost="assignment"))
    for number in range(1, 101):
        outcomes = (UpdateOutcome(UpdateId("toy-1", "pi-1", number), "dropped"),)
        made = Assignment(f"toy-1.{number}.pi-1", "toy-1", "toy", "train", "", outcomes=outcomes)
        assert (one.choose_behavior(made).lost, one.choose_behavior(made).lost) == ("assignment", ""), (
            "a message is lost once"
        )
        one.receive(made)
    kept = [value for value in vars(one).values() if isinstance(value, (dict, set, deque))]
    assert max(map(len, kept)) == 1 + MAX_DELAY, "as many assignments as it may have at once"
