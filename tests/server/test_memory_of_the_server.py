"""What the server's optimizer and ef21 remember: there after a kill, bit for bit, or the run does not go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.server_bench import LAYOUT, SILENT, Bench, scripted, work
from thinwire.aggregation.server_optimizers import optimizers
from thinwire.compression import parse
from thinwire.compression.feedback import ef21
from thinwire.core import Key
from thinwire.core.errors import DataLost
from thinwire.core.events import Event, ModelStored, RoundOpened, UpdateAggregated, UpdateDropped
from thinwire.core.types import Assignment, State
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, Script, ScriptedDevice, SyntheticUpdates

ADAM = {"optimizer": "fedadam", "lr": 0.1}
EF21: dict[str, Any] = {"codec": "topk(0.2)", "feedback": "ef21"}


def run(folder: Path, devices: list[ScriptedDevice], **sections: Any) -> Bench:
    bench = Bench(folder, devices, **sections)
    assert bench.drive().status == "done"
    return bench


def last(bench: Bench) -> ModelStored:
    return bench.events(ModelStored)[-1]


@pytest.mark.parametrize("optimizer", [name for name in optimizers if name != "fedavg"])
def test_a_run_that_is_closed_and_opened_again_after_any_round_ends_with_the_same_bits(tmp_path, optimizer):
    server = {"optimizer": optimizer, "lr": 0.1}
    whole = run(tmp_path / "whole", [scripted("a"), scripted("b")], run={"rounds": 4}, server=server)
    parted = Bench(tmp_path / "parted", [scripted("a"), scripted("b")], run={"rounds": 4}, server=server)
    for closed in (1, 2, 3):
        parted.drive(stop=lambda at=closed: "service" if len(parted.reasons()) >= at else None)
        parted.restart()
    assert parted.drive().status == "done"
    assert last(parted).digest == last(whole).digest
    assert last(parted).state == last(whole).state != ""


def test_fedavg_remembers_nothing_and_writes_no_file(tmp_path):
    bench = run(tmp_path, [scripted("a")], run={"rounds": 2})
    assert last(bench).state == ""
    assert not list(bench.home.run(bench.run_id).glob("*.state"))


def test_files_of_versions_that_are_not_kept_go_with_them(tmp_path):
    bench = run(tmp_path, [scripted("a")], run={"rounds": 5}, server=ADAM)
    folder = bench.home.run(bench.run_id)
    models = {path.stem for path in folder.glob("*.model")} - {"v000000"}
    assert {path.stem for path in folder.glob("*.state")} == models


def test_a_run_whose_memory_is_damaged_does_not_go_on_without_it(tmp_path):
    bench = Bench(tmp_path, [scripted("a")], run={"rounds": 3}, server=ADAM)
    bench.drive(stop=lambda: "service" if bench.reasons() else None)
    path = bench.home.run(bench.run_id) / "v000001.state"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataLost, match="what the server optimizer remembers"):
        bench.drive()


class Following(SyntheticUpdates):
    """A device that keeps its reference, as ef21 says."""

    def encoded(self, assignment: Assignment, segment: int, change: np.ndarray) -> bytes:
        codec = ef21(parse(assignment.codec)).bind(LAYOUT)
        restarted = assignment.references_from > getattr(self, "since", 0)
        self.since = assignment.references_from
        self.state: State = codec.init() if restarted else getattr(self, "state", codec.init())
        encoded = codec.encode(change, self.state, Key(1))
        self.state = encoded.state
        return encoded.payload


def following(name: str, script: Script | float = 1.0, examples: int = 10) -> ScriptedDevice:
    return scripted(name, script, work(name, Following, examples=examples))


def reference(device: ScriptedDevice) -> np.ndarray:
    assert isinstance(device.work, Following)
    return device.work.state["reference"]


def test_with_ef21_the_model_moves_by_the_mean_of_all_references(tmp_path):
    devices = [following("a", examples=10), following("b", examples=30)]
    cohort = {"late": "drop"}
    bench = run(tmp_path, devices, run={"rounds": 1}, uplink=EF21, cohort=cohort)
    params, _ = bench_versions(bench).read(last(bench))
    expected = 5.0 * (10 * reference(devices[0]) + 30 * reference(devices[1])) / 40
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


def test_with_ef21_a_device_that_is_not_there_counts_with_its_last_reference(tmp_path):
    devices = [
        following("a", examples=10),
        following("b", lambda assignment: Behavior() if assignment.round == 1 else SILENT, examples=30),
    ]
    cohort = {"late": "drop", "deadline_s": 10, "min_updates": 1}
    bench = run(tmp_path, devices, run={"rounds": 2, "keep": "all"}, uplink=EF21, cohort=cohort)
    before, after = (bench_versions(bench).read(stored)[0] for stored in bench.events(ModelStored)[1:3])
    expected = 5.0 * (10 * reference(devices[0]) + 30 * reference(devices[1])) / 40
    np.testing.assert_allclose(after - before, expected, rtol=1e-4, atol=1e-5)


def shutting_out(folder: Path) -> Bench:
    """Three devices, of which c is revoked in the second round, after it was aggregated; b is late in that round."""
    late = following("b", lambda assignment: Behavior(compute_s=35.0 if assignment.round == 2 else 2.0), examples=20)
    devices = [following("a", 3.0, examples=10), late, following("c", 1.0, examples=30)]
    cohort = {"deadline_s": 30, "staleness_exponent": 0}
    bench = Bench(folder, devices, run={"rounds": 6, "keep": "all"}, uplink=EF21, cohort=cohort)
    for device in devices:
        bench.store.roster.enrol(device.name, device.name * 64, device.name.encode(), "loopback")
    return bench


def test_with_ef21_nothing_of_a_device_that_was_revoked_moves_the_model_any_more(tmp_path):
    bench = shutting_out(tmp_path)

    def on_event(event: Event) -> None:
        if isinstance(event, UpdateAggregated) and event.round == 2 and "/c/" in event.update_id:
            bench.store.roster.revoke("c")
            bench.fleet.revoke_access(["c"])

    assert bench.drive(on_event=on_event).status == "done"
    assert [e.references_from for e in bench.events(RoundOpened)] == [0, 0, 3, 3, 3, 3]
    before, after = (bench_versions(bench).read(stored)[0] for stored in bench.events(ModelStored)[-2:])
    a, b = (reference(bench.fleet.devices[name]) for name in "ab")
    np.testing.assert_allclose(after - before, 5.0 * (10 * a + 20 * b) / 30, rtol=1e-4, atol=1e-5)
    assert {e.reason for e in bench.events(UpdateDropped)} == {"stale"}, "b's late one was a difference to the old one"


def test_with_ef21_a_kill_around_a_revoking_changes_nothing(tmp_path):
    def made(folder: str, stops: tuple[int, ...]) -> Bench:
        bench = shutting_out(tmp_path / folder)
        bench.drive(stop=lambda: "service" if len(bench.reasons()) >= 2 else None)
        bench.store.roster.revoke("c")
        bench.restart()
        bench.fleet.revoke_access(["c"])
        for closed in stops:
            bench.drive(stop=lambda at=closed: "service" if len(bench.reasons()) >= at else None)
            bench.restart()
        assert bench.drive().status == "done"
        return bench

    whole, parted = made("whole", ()), made("parted", (3, 4, 5))
    assert (last(parted).digest, last(parted).state) == (last(whole).digest, last(whole).state)


def test_with_ef21_a_run_that_was_opened_again_ends_with_the_same_bits(tmp_path):
    def bench(folder: str) -> Bench:
        devices = [following("a", examples=10), following("b", examples=30)]
        return Bench(tmp_path / folder, devices, run={"rounds": 4}, uplink=EF21, cohort={"late": "drop"})

    whole, parted = bench("whole"), bench("parted")
    whole.drive()
    for closed in (1, 2, 3):
        parted.drive(stop=lambda at=closed: "service" if len(parted.reasons()) >= at else None)
        parted.restart()
    assert parted.drive().status == "done"
    assert (last(parted).digest, last(parted).state) == (last(whole).digest, last(whole).state)


def bench_versions(bench: Bench) -> Versions:
    return Versions(bench.home.run(bench.run_id), LAYOUT)
