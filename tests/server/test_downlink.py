"""The compressed way down: who gets changes and who the whole model, and that a kill anywhere changes nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.scripted import LAYOUT, Device
from tests.server.test_run import Bench, drive_killed_at, outcome, steady, straggling
from thinwire.aggregation import Shadow, digest
from thinwire.client.exchange import take_base
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.events import AskedInFull, ModelStored, ShadowStored
from thinwire.core.types import Ask, Failure, Vector
from thinwire.store import Store

DOWN = {"codec": "topk(0.05) > int8 > rice"}
FULL = LAYOUT.size * 4


@dataclass
class Holding(Device):
    """A device that keeps the shadow, as client/work.py does, and trains from it: its change depends on every bit."""

    shadow: Shadow = field(default_factory=lambda: Shadow(LAYOUT, DOWN["codec"]))
    held: dict[int, str] = field(default_factory=dict)  # version -> the digest of what it held then

    def take(self, ask: Ask) -> float | Failure | None:
        try:
            take_base(ask, self.bundle, self.shadow)
        except BadPayload as error:
            return Failure("base-mismatch", str(error), ask.ask_id)
        self.held[ask.base_version] = digest(self.shadow.params)
        return super().take(ask)

    def encoded(self, ask: Ask, change: Vector) -> bytes:
        return super().encoded(ask, change - self.shadow.params / np.float32(50))


def devices(third: Any = lambda ask: 1.0) -> list[Device]:
    return [Holding("a"), Holding("b", lambda ask: 2.0), Holding("c", third)]


def new(folder: Path, *, third: Any = lambda ask: 1.0, downlink: dict[str, Any] = DOWN, **sections: Any) -> Bench:
    cohort = {"deadline_s": 30, **sections.pop("cohort", {})}
    run = {"rounds": 6, **sections.pop("run", {})}
    return Bench(folder, devices(third), run=run, cohort=cohort, downlink=downlink, **sections)


def asked(bench: Bench, device: str) -> list[tuple[int, tuple[str, ...]]]:
    """(version, parts) of each training ask that went to a device."""
    asks = [e.ask for e in bench.fleet.sent if e.device == device and e.ask.kind == "train"]
    return [(ask.base_version, tuple(part.name for part in ask.parts)) for ask in asks]


def assert_same_bits(bench: Bench) -> None:
    """Law: all devices at a version hold the bits that the aggregator recorded for it."""
    recorded = {e.version: e.digest for e in bench.events(ModelStored)}
    recorded |= {e.version: e.digest for e in bench.events(ShadowStored)}
    for device in bench.fleet.devices:
        assert isinstance(device, Holding)
        assert device.held
        assert all(recorded[version] == held for version, held in device.held.items())


def test_the_first_ask_carries_the_model_and_later_ones_the_changes(tmp_path: Path) -> None:
    bench = new(tmp_path)
    assert bench.drive().status == "done"
    assert asked(bench, "a") == [(0, ("full/0",)), *((v, (f"{v}/0",)) for v in range(1, 6))]
    assert_same_bits(bench)


def test_a_device_that_missed_rounds_gets_their_changes_in_order(tmp_path: Path) -> None:
    bench = new(tmp_path, third=lambda ask: 31.0 if ask.round == 2 else 1.0)
    assert bench.drive().status == "done"
    assert ("2/0", "3/0") in [parts for _, parts in asked(bench, "c")]
    assert_same_bits(bench)


@pytest.mark.parametrize("more", [{"log_rounds": 1}, {"full_every": 3}])
def test_a_device_behind_the_log_or_a_full_version_gets_the_model_in_full(tmp_path: Path, more: Any) -> None:
    bench = new(tmp_path, third=lambda ask: 31.0 if ask.round == 2 else 1.0, downlink=DOWN | more)
    assert bench.drive().status == "done"
    assert [parts for _, parts in asked(bench, "c")].count(("full/0",)) > 1
    assert_same_bits(bench)
    whole = {e.version for e in bench.events(ModelStored)} - {e.version for e in bench.events(ShadowStored)}
    assert whole == ({0, 3, 6} if "full_every" in more else {0})


def test_a_round_after_too_few_replies_sends_nothing_that_is_held(tmp_path: Path) -> None:
    bench = new(tmp_path, cohort={"min_replies": 3}, third=lambda ask: None if ask.round == 2 else 1.0)
    bench.drive()
    assert asked(bench, "a")[2] == (1, ())
    assert_same_bits(bench)


def test_bytes_down_are_those_of_the_parts(tmp_path: Path) -> None:
    bench = new(tmp_path)
    row = bench.drive()
    sent = sum(part.length for e in bench.fleet.sent if e.ask.kind != "stop" for part in e.ask.parts)
    assert row.payload_down == sent
    assert row.payload_down < 3 * 2 * FULL


def test_a_device_that_lost_its_model_gets_the_same_ask_again_in_full_and_the_bytes_count(tmp_path: Path) -> None:
    bench = new(tmp_path)
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 2 else None)
    lost = bench.fleet.devices[0]
    assert isinstance(lost, Holding)
    lost.shadow = Shadow(LAYOUT, DOWN["codec"])
    bench.fleet = bench.fleet.restart()
    row = bench.drive()
    assert (row.status, bench.reasons()) == ("done", ["all"] * 6)
    (again,) = bench.events(AskedInFull)
    assert (again.device, again.payload_bytes > FULL) == ("a", True)
    assert (
        asked(bench, "a")[-4:-2] == [(3, ("full/0",)), (4, ("4/0",))] or ("full/0",) in dict(asked(bench, "a")).values()
    )
    sent = sum(part.length for e in bench.fleet.sent if e.ask.kind != "stop" for part in e.ask.parts)
    assert row.payload_down == sent
    assert_same_bits(bench)


def test_devices_that_are_ahead_of_a_restored_backup_come_back_to_it(tmp_path: Path) -> None:
    bench, kept = new(tmp_path / "home"), tmp_path / "backup"
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 2 else None)
    bench.store.close()
    shutil.copytree(bench.home.root, kept)
    bench.store = Store.open(bench.home.database)
    bench.fleet = bench.fleet.restart()
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 5 else None)
    bench.store.close()
    shutil.rmtree(bench.home.root)
    shutil.copytree(kept, bench.home.root)
    bench.store = Store.open(bench.home.database)
    for device in bench.fleet.devices:
        device.answered.clear()
        device.sequence += 10
    bench.fleet = bench.fleet.restart()
    bench.fleet.spooled.clear()
    row = bench.drive()
    assert (row.status, row.version) == ("done", 6)
    assert {e.device for e in bench.events(AskedInFull)} == {"a", "b", "c"}
    assert_same_bits(bench)


def test_changes_that_cannot_be_read_any_more_are_not_promised(tmp_path: Path) -> None:
    bench = new(tmp_path)
    bench.drive(stop=lambda: "service" if len(bench.reasons()) == 2 else None)
    for path in bench.home.run(bench.run_id).glob("*.change"):
        path.unlink()
    bench.fleet = bench.fleet.restart()
    assert bench.drive().status == "done"
    assert_same_bits(bench)


def test_a_shadow_that_is_damaged_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    bench = new(tmp_path)
    bench.drive(stop=lambda: "service" if bench.reasons() else None)
    path = bench.home.run(bench.run_id) / "v000001.shadow"
    path.write_bytes(path.read_bytes()[:-4] + b"xxxx")
    with pytest.raises(DataLost, match="damaged"):
        bench.drive()


@pytest.mark.parametrize("third", [steady, straggling])
def test_a_kill_at_any_commit_changes_nothing(tmp_path: Path, third: Any) -> None:
    undisturbed = new(tmp_path / "undisturbed", third=third, run={"rounds": 4})
    commits = drive_killed_at(undisturbed, 0, False)
    assert undisturbed.store.run(undisturbed.run_id).status == "done"
    assert_same_bits(undisturbed)
    for at in range(1, commits + 1):
        for before in (True, False) if third is steady else (True,):
            bench = new(tmp_path / f"{at}-{before}", third=third, run={"rounds": 4})
            drive_killed_at(bench, at, before)
            assert_same_bits(bench)
            if third is steady:
                assert outcome(bench) == outcome(undisturbed), f"killed {'before' if before else 'after'} commit {at}"
                shadows = [(e.version, e.digest) for e in bench.events(ShadowStored)]
                assert shadows == [(e.version, e.digest) for e in undisturbed.events(ShadowStored)]
            bench.store.close()


def test_files_that_nobody_needs_any_more_are_removed(tmp_path: Path) -> None:
    bench = new(tmp_path, downlink=DOWN | {"log_rounds": 2})
    bench.drive()
    names = {path.name for path in bench.home.run(bench.run_id).glob("v*")}
    assert {name for name in names if name.endswith(".change")} == {"v000005.change", "v000006.change"}
    assert {name for name in names if name.endswith(".shadow")} == {"v000006.shadow"}
