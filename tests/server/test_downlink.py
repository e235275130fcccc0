"""The compressed downlink: who gets changes and who the whole model, and that a kill anywhere changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.test_run import steady, straggling
from tests.support.server_bench import LAYOUT, SILENT, Bench, drive_through, killed, outcome, scripted, work
from thinwire.aggregation import ModelReplica, digest
from thinwire.client.payload import update_replica
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.events import FullModelSent, ModelStored, ReplicaStored
from thinwire.core.fleet import Delivery
from thinwire.core.types import Assignment, Vector
from thinwire.server.model_store import ModelDistributor
from thinwire.simulation import Behavior, InMemorySpool, Script, SyntheticUpdates
from thinwire.store import Store

DOWN = {"codec": "topk(0.05) > int8 > rice"}
FULL = LAYOUT.size * 4


@dataclass
class Holding(SyntheticUpdates):
    """Keeps the replica, as client/execute.py does, and trains from it: its change depends on every bit."""

    replica: ModelReplica = field(default_factory=lambda: ModelReplica(LAYOUT, DOWN["codec"]))
    held: dict[int, str] = field(default_factory=dict)  # version -> the digest of what it held then

    def begin(self, delivery: Delivery, behavior: Behavior) -> Behavior:
        try:
            update_replica(delivery.assignment, delivery.bundle, self.replica)
        except BadPayload as error:
            return Behavior(compute_s=0.0, failure=("base-mismatch", str(error)))
        self.held[delivery.assignment.base_version] = digest(self.replica.params)
        return behavior

    def encoded(self, assignment: Assignment, segment: int, change: Vector) -> bytes:
        return super().encoded(assignment, segment, change - self.replica.params / np.float32(50))


def new(folder: Path, *, third: Script | float = 1.0, downlink: dict[str, Any] = DOWN, **sections: Any) -> Bench:
    cohort = {"deadline_s": 30, **sections.pop("cohort", {})}
    run = {"rounds": 6, **sections.pop("run", {})}
    devices = [scripted(name, script, work(name, Holding)) for name, script in {"a": 1.0, "b": 2.0, "c": third}.items()]
    return Bench(folder, devices, run=run, cohort=cohort, downlink=downlink, **sections)


def holding(bench: Bench) -> list[Holding]:
    return [device.work for device in bench.fleet.devices.values() if isinstance(device.work, Holding)]


def assigned(bench: Bench, device: str) -> list[tuple[int, tuple[str, ...]]]:
    """(version, parts) of each training assignment that went to a device."""
    return [
        (assignment.base_version, tuple(part.name for part in assignment.parts))
        for assignment in bench.assignments(device)
    ]


def test_only_bundles_that_are_still_on_disk_are_known_as_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, most = ModelDistributor.publish, 0

    def published(distributor: ModelDistributor, *given: Any) -> list[ReplicaStored]:
        nonlocal most
        found = publish(distributor, *given)
        most = max(most, len(distributor._checked))
        assert all(path.exists() for path in distributor._checked)
        return found

    monkeypatch.setattr(ModelDistributor, "publish", published)
    new(tmp_path, third=9.3, run={"rounds": 12}, cohort={"mode": "buffered", "buffer": 2, "max_staleness": 20}).drive()
    assert most


def assert_same_bits(bench: Bench) -> None:
    """Law: all devices at a version hold the bits that the aggregator recorded for it."""
    recorded = {e.version: e.digest for e in bench.events(ModelStored)}
    recorded |= {e.version: e.digest for e in bench.events(ReplicaStored)}
    for one in holding(bench):
        assert one.held
        assert all(recorded[version] == held for version, held in one.held.items())


def test_the_first_assignment_carries_the_model_and_later_ones_the_changes(tmp_path: Path) -> None:
    bench = new(tmp_path)
    assert bench.drive().status == "done"
    assert assigned(bench, "a") == [(0, ("full/0",)), *((v, (f"{v}/0",)) for v in range(1, 6))]
    assert_same_bits(bench)


def test_a_device_that_missed_rounds_gets_their_changes_in_order(tmp_path: Path) -> None:
    bench = new(tmp_path, third=lambda assignment: Behavior(compute_s=31.0 if assignment.round == 2 else 1.0))
    assert bench.drive().status == "done"
    assert ("2/0", "3/0") in [parts for _, parts in assigned(bench, "c")]
    assert_same_bits(bench)


@pytest.mark.parametrize("more", [{"log_rounds": 1}, {"full_every": 3}])
def test_a_device_behind_the_log_or_a_full_version_gets_the_model_in_full(tmp_path: Path, more: Any) -> None:
    bench = new(
        tmp_path,
        third=lambda assignment: Behavior(compute_s=31.0 if assignment.round == 2 else 1.0),
        downlink=DOWN | more,
    )
    assert bench.drive().status == "done"
    assert [parts for _, parts in assigned(bench, "c")].count(("full/0",)) > 1
    assert_same_bits(bench)
    whole = {e.version for e in bench.events(ModelStored)} - {e.version for e in bench.events(ReplicaStored)}
    assert whole == ({0, 3, 6} if "full_every" in more else {0})


@pytest.mark.parametrize(
    ("more", "parts"), [({}, ("1/0", "2/0", "3/0", "4/0", "5/0")), ({"log_rounds": 2}, ("full/0",))]
)
def test_in_buffered_rounds_a_version_older_than_the_log_gets_the_full_replica(
    tmp_path: Path, more: Any, parts: tuple[str, ...]
) -> None:
    """Five versions are made while c works on its first assignment: it gets their changes, or the replica where they
    went.
    """
    cohort = {"mode": "buffered", "buffer": 2, "max_staleness": 20}
    bench = new(tmp_path, third=9.3, run={"rounds": 12}, cohort=cohort, downlink=DOWN | more)
    assert bench.drive().status == "done"
    assert assigned(bench, "c")[:2] == [(0, ("full/0",)), (5, parts)]
    assert ("5/0", "6/0") in [parts for _, parts in assigned(bench, "b")], "one that is within the log"
    assert_same_bits(bench)


def test_a_round_after_too_few_replies_sends_nothing_that_is_held(tmp_path: Path) -> None:
    bench = new(
        tmp_path, cohort={"min_updates": 3}, third=lambda assignment: SILENT if assignment.round == 2 else Behavior()
    )
    bench.drive()
    assert assigned(bench, "a")[2] == (1, ())
    assert_same_bits(bench)


def test_bytes_down_are_those_of_the_parts(tmp_path: Path) -> None:
    bench = new(tmp_path)
    row = bench.drive()
    sent = sum(part.length for e in bench.fleet.sent if e.assignment.kind != "stop" for part in e.assignment.parts)
    assert row.payload_down == sent
    assert row.payload_down < 3 * 2 * FULL


def test_a_device_that_lost_its_model_gets_the_same_assignment_again_in_full_and_the_bytes_count(
    tmp_path: Path,
) -> None:
    bench = new(tmp_path)
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 2 else None)
    holding(bench)[0].replica = ModelReplica(LAYOUT, DOWN["codec"])
    bench.restart()
    row = bench.drive()
    assert (row.status, bench.reasons()) == ("done", ["all"] * 6)
    (again,) = bench.events(FullModelSent)
    assert (again.device, again.payload_bytes > FULL) == ("a", True)
    assert (
        assigned(bench, "a")[-4:-2] == [(3, ("full/0",)), (4, ("4/0",))]
        or ("full/0",) in dict(assigned(bench, "a")).values()
    )
    sent = sum(part.length for e in bench.fleet.sent if e.assignment.kind != "stop" for part in e.assignment.parts)
    assert row.payload_down == sent
    assert_same_bits(bench)


def test_devices_that_are_ahead_of_a_restored_backup_come_back_to_it(tmp_path: Path) -> None:
    bench, kept = new(tmp_path / "home"), tmp_path / "backup"
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 2 else None)
    bench.store.close()
    shutil.copytree(bench.home.root, kept)
    bench.store = Store.open(bench.home.database)
    bench.restart()
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 5 else None)
    bench.store.close()
    shutil.rmtree(bench.home.root)
    shutil.copytree(kept, bench.home.root)
    bench.store = Store.open(bench.home.database)
    for device in bench.fleet.devices.values():
        device.outbox.clear()
    bench.fleet = bench.fleet.restart(InMemorySpool(bench.home.spool))
    row = bench.drive()
    assert (row.status, row.version) == ("done", 6)
    assert {e.device for e in bench.events(FullModelSent)} == {"a", "b", "c"}
    assert_same_bits(bench)


def test_changes_that_are_not_readable_any_more_are_not_promised(tmp_path: Path) -> None:
    bench = new(tmp_path)
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 2 else None)
    for path in bench.home.run(bench.run_id).glob("*.change"):
        path.unlink()
    bench.restart()
    assert bench.drive().status == "done"
    assert_same_bits(bench)


def test_a_replica_that_is_damaged_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    bench = new(tmp_path)
    bench.drive(stop=lambda: "service" if bench.reasons() else None)
    path = bench.home.run(bench.run_id) / "v000001.replica"
    path.write_bytes(path.read_bytes()[:-4] + b"xxxx")
    with pytest.raises(DataLost, match="damaged"):
        bench.drive()


@pytest.mark.parametrize("third", [steady, straggling])
def test_a_kill_at_any_commit_changes_nothing(tmp_path: Path, third: Any) -> None:
    begin = partial(new, third=third, run={"rounds": 4})
    undisturbed = begin(tmp_path / "undisturbed")
    places = drive_through(undisturbed)
    assert undisturbed.store.run(undisturbed.run_id).status == "done"
    assert_same_bits(undisturbed)

    def check(bench: Bench, where: str) -> None:
        assert_same_bits(bench)
        if third is steady:
            assert outcome(bench) == outcome(undisturbed), where
            replicas = [(e.version, e.digest) for e in bench.events(ReplicaStored)]
            assert replicas == [(e.version, e.digest) for e in undisturbed.events(ReplicaStored)]

    killed(begin, tmp_path, places, check, slice(0, None, 1 if third is steady else 2))


def test_files_that_nobody_needs_any_more_are_removed(tmp_path: Path) -> None:
    bench = new(tmp_path, downlink=DOWN | {"log_rounds": 2})
    bench.drive()
    names = {path.name for path in bench.home.run(bench.run_id).glob("v*")}
    assert {name for name in names if name.endswith(".change")} == {"v000005.change", "v000006.change"}
    assert {name for name in names if name.endswith(".replica")} == {"v000006.replica"}


def test_a_run_that_keeps_all_models_lists_its_folder_once_and_removes_the_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, glob = list[str](), Path.glob

    def noted(path: Path, pattern: str) -> Iterator[Path]:
        listed.append(pattern)
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", noted)
    bench = new(tmp_path, downlink=DOWN | {"log_rounds": 2}, run={"keep": "all", "rounds": 9})
    bench.drive()
    assert sorted(pattern for pattern in listed if pattern.startswith("v")) == ["v*.change", "v*.from*", "v*.replica"]
    monkeypatch.undo()
    names = {path.name for path in bench.home.run(bench.run_id).glob("v*")}
    assert {name for name in names if name.endswith(".model")} == {f"v{version:06d}.model" for version in range(10)}
    assert {name for name in names if name.endswith(".replica")} == {"v000009.replica"}
    assert {name for name in names if name.endswith(".change")} == {"v000008.change", "v000009.change"}
