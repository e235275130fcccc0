"""Rounds by a reduction: a kill changes nothing, hostile clients move nothing, and each update is aggregated."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import crashes
from tests.support.crashes import LAYOUT, Fate, Outcome, Whole, change, killed, undisturbed_once
from tests.support.explained import whys
from tests.support.faulty_fleet import AttentiveDevice, FaultyBehavior
from tests.support.normed import NORMED, normed, three_honest
from tests.support.server_bench import Bench
from tests.support.several_runs import Site, steady
from thinwire.aggregation import CoordinateWise, reduction_base
from thinwire.aggregation.reduction_base import Rows
from thinwire.cli.runs.progress import Teller
from thinwire.cli.runs.render import capping
from thinwire.core import RunPlan
from thinwire.core.clock import VirtualClock
from thinwire.core.events import (
    ClientReconnected,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateDropped,
)
from thinwire.core.types import Assignment, Vector
from thinwire.server import command_queue, round_close
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, SyntheticUpdates
from thinwire.store.round_timing import turns

PLAN = RunPlan.parse("""
[run]
task = "toy"
rounds = 2
[cohort]
wait_for = 6
deadline_s = 40
late = "drop"
[local]
lr = 1.0
[uplink]
codec = "topk(0.5) > int8"
[server]
optimizer = "fedavgm"
reduce = "multi-krum(1, 2)"
max_norm = "q0.5"
""")
RAW = {"codec": "identity"}
REDUCTIONS = ("median", "trimmed(1)", "krum(1)", "multi-krum(1, 2)", "geometric-median", "clipped(0.1)")


class World(crashes.World):
    """Six devices that reply in another order each round; one sends garbage, one is hostile."""

    def __init__(self, folder: Path, fate: Fate) -> None:
        works = [SyntheticUpdates(name, LAYOUT, partial(self.change, name)) for name in "abcdef"]
        devices = [AttentiveDevice(work.name, work, partial(self.behavior, work.name)) for work in works]
        super().__init__(folder, fate, PLAN, devices)

    def change(self, name: str, assignment: Assignment) -> Vector:
        """What a device sends: about 1; `b` is hostile, also within the bound on norms."""
        found: Vector = 1 + change(name, LAYOUT.size, assignment) / np.float32(10)
        return found * np.float32(-1e6) if name == "b" else found

    def behavior(self, name: str, assignment: Assignment) -> Behavior:
        """A device's place in the round."""
        if assignment.kind != "train":
            return Behavior(compute_s=0.0)
        place = "abcdef".index(name) if assignment.round == 1 else "fedcba".index(name)
        return FaultyBehavior(compute_s=1.0 + place, garbage=(name, assignment.round) == ("e", 1))


undisturbed = undisturbed_once(World)


def test_a_kill_anywhere_chooses_the_same_updates(undisturbed: Whole, tmp_path: Path) -> None:
    made, places = undisturbed
    closed = made.of(RoundClosed)
    assert [len(e.chosen) for e in closed] == [2, 2]
    assert [len(e.aggregated) for e in closed] == [5, 6]
    assert {e.update_id.split("/")[1] for e in made.of(UpdateDropped)} == {"e"}
    assert not any("/b/" in chosen for e in closed for chosen in e.chosen)
    assert [len(e.norms) for e in closed] == [5, 6]

    def check(again: Outcome, where: str) -> None:
        assert again.same() == made.same(), where
        said = [(e.chosen, e.norms, e.capped) for e in again.of(RoundClosed)]
        assert said == [(e.chosen, e.norms, e.capped) for e in closed], where
        assert again.of(ClientReconnected) == made.of(ClientReconnected)

    killed(World, tmp_path, places, check, kinds=("commit",))


def params(made: Bench) -> Vector:
    last = made.events(ModelStored)[-1]
    return Versions(made.home.run(made.run_id), NORMED, False).read(last)[0]


def bench(folder: Path, hostile: Any, **server: Any) -> Bench:
    sections: dict[str, Any] = {"run": {"rounds": 2}, "cohort": {"late": "drop"}, "uplink": RAW, "server": server}
    made = Bench(folder, [hostile, *three_honest(), normed("e")], layout=NORMED, **sections)
    assert made.drive().status == "done"
    return made


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_hostile_client_moves_neither_model_nor_buffers(tmp_path: Path, reduce: str) -> None:
    said: dict[str, Any] = {
        "mean": 1e9,
        "variance": 1e18,
        "counters": {"bn.num_batches_tracked": 2**40},
        "examples": 10**9,
    }
    made = bench(tmp_path, normed("a", 1e9, **said), reduce=reduce)
    assert np.abs(params(made) - 2.0).max() < 0.2, "two rounds of updates of 1"
    last = made.events(ModelStored)[-1]
    _, buffers = Versions(made.home.run(made.run_id), NORMED, False).read(last)
    assert np.array_equal(buffers, np.array([0.5] * 3 + [1.0] * 3, np.float32))
    assert last.counters == {"bn.num_batches_tracked": 7}
    assert {len(e.aggregated) for e in made.events(RoundClosed)} == {5}, "also what was not chosen"


def test_a_value_that_no_mean_may_have_is_dropped_before_it_is_looked_at(tmp_path: Path) -> None:
    made = bench(tmp_path, normed("a", 2.0**90), reduce="median")
    assert {(e.device, e.reason) for e in made.events(UpdateDropped)} == {("a", "bad-payload")}


def test_the_chosen_clients_are_told(tmp_path: Path) -> None:
    made = bench(tmp_path, normed("a", 9.0), reduce="krum(1)")
    (chosen,) = {name.split("/")[1] for e in made.events(RoundClosed) for name in e.chosen}
    updates, rounds = made.store.updates(made.run_id), made.store.rounds(made.run_id)
    assert list(capping(updates, rounds)) == [f"{chosen}: chosen by the reduction in 2 of 2 rounds"]
    assert {one.outcome for one in updates} == {"aggregated"}
    told = whys(made.store.run(made.run_id), rounds, updates, turns(rounds))
    assert all(one.sentence.endswith(f" {chosen}: chosen by the reduction.") for one in told)
    teller = Teller()
    lines = [line for _, event in made.store.events(made.run_id) for line in teller.hear(event)]
    assert sum(f"chosen by the reduction: {chosen}" in line for line in lines) == 2


@pytest.mark.parametrize("max_norm", [2.0, "q0.5"])
@pytest.mark.parametrize("reduce", ["mean", *REDUCTIONS])
def test_a_bound_on_norms_scales_what_is_over_it(tmp_path: Path, max_norm: float | str, reduce: str) -> None:
    """The norm of an honest update of 40 values of 1 is the root of 40; no header tells it."""
    made = bench(tmp_path, normed("a", 1e9), max_norm=max_norm, reduce=reduce)
    bound = max_norm if isinstance(max_norm, float) else 40**0.5
    for closed in made.events(RoundClosed):
        (hostile,) = [one for name, one in closed.capped.items() if "/a/" in name]
        assert hostile["norm"] == pytest.approx(1e9 * 40**0.5, rel=1e-6)
        assert hostile["norm_counted"] == pytest.approx(bound, rel=1e-6)
        assert len(closed.capped) == (5 if max_norm == 2.0 else 1)
    assert np.allclose(params(made), 2 * bound / 40**0.5, rtol=1e-5)


def test_a_run_of_too_few_clients_waits_and_says_why(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"cohort": {"late": "drop", "wait_for": 1, "wait_s": 5}, "server": {"reduce": "krum(1)"}}
    made = Bench(tmp_path, three_honest(), layout=NORMED, uplink=RAW, **sections)
    row = made.drive()
    assert row.status == "failed"
    assert '[server] reduce = "krum(1)" needs 5' in row.status_text


@pytest.mark.parametrize(
    ("free", "refused", "why"),
    [
        (10**6, "", "has 0.00 GB in all"),
        (10**12, "posix_fallocate", os.strerror(errno.EIO)),
        (10**12, "pwrite", os.strerror(errno.EIO)),
    ],
    ids=["too-small", "broken", "broken-later"],
)
def test_updates_that_the_disk_does_not_take_end_their_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, refused: str, why: str
) -> None:
    """Without a reserve a service whose disk is full raises an error; with one it would pause all runs."""
    files = list[Any]()

    def opened(**how: Any) -> Any:
        files.append(tempfile.TemporaryFile(**how))  # noqa: SIM115
        return files[-1]

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reduction_base, "tempfile", SimpleNamespace(TemporaryFile=opened))
    calls = {"posix_fallocate": os.posix_fallocate, "pwrite": os.pwrite, refused: refuse}
    monkeypatch.setattr(reduction_base, "os", SimpleNamespace(**{name: calls[name] for name in calls if name}))
    disk = SimpleNamespace(free=free, total=free)
    monkeypatch.setattr(reduction_base, "shutil", SimpleNamespace(disk_usage=lambda folder: disk))
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.4, "c": 2.3}))
    reduced = site.submit(server={"reduce": "median"}, cohort={"late": "drop"}, uplink=RAW)
    other = site.submit()
    site.serve()
    row = site.store.run(reduced)
    assert (row.status, row.exit_code) == ("failed", 1)
    assert row.status_text.startswith("[server] reduce keeps ")
    assert why in row.status_text
    assert site.store.run(other).status == "done"
    assert bool(files) == (free > 10**6)
    assert all(file.closed for file in files), "the disk has its space again"


@pytest.mark.parametrize("taken", [False, True], ids=["full", "filled-meanwhile"])
def test_a_run_waits_while_other_files_fill_the_disk_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.4, "c": 2.3}))
    sections: dict[str, Any] = {"server": {"reduce": "median"}, "cohort": {"late": "drop"}, "uplink": RAW}
    little = itertools.cycle(range(0, 2 * 10**8, 10**7))  # other files come and go; the status does not follow
    reduced, stopped, other = site.submit(**sections), site.submit(run={"seed": 1}, **sections), site.submit()

    def is_full() -> bool:
        return site.store.run(other).status != "done" or site.store.run(stopped).status != "stopped"

    def free(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=next(little) if is_full() and not taken else 10**12, total=10**12)

    def allocate(descriptor: int, offset: int, size: int) -> None:
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, offset, size)

    def on_event(run_id: str, event: Event) -> None:
        if run_id == other and isinstance(event, RoundClosed) and event.round == 2:
            site.store.commands.add("stop-run", stopped)

    site.on_event = on_event
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)
    monkeypatch.setattr(reduction_base, "shutil", SimpleNamespace(disk_usage=free))
    calls = {"posix_fallocate": allocate, "pwrite": os.pwrite, "preadv": os.preadv}
    monkeypatch.setattr(reduction_base, "os", SimpleNamespace(**calls))
    site.serve()
    assert [site.store.run(run_id).status for run_id in (reduced, stopped, other)] == ["done", "stopped", "done"]
    waits = [event.text for event in site.events(reduced, RunStatusChanged) if event.status == "waiting"]
    assert sum(text.endswith("it goes on when there is space") for text in waits) == 1
    rounds = site.events(reduced, RoundClosed)
    assert [(event.reason, len(event.aggregated)) for event in rounds] == [("all", 3)] * 3, "no deadline passed"


def test_a_run_that_waits_for_space_is_paused_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, said = Site(tmp_path, steady(dict.fromkeys("abc", 1.0))), list[str]()
    sections: dict[str, Any] = {"server": {"reduce": "median"}, "cohort": {"late": "drop"}, "uplink": RAW}
    site.submit(run={"rounds": 1}, **sections)

    def free(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=10**12 if "paused" in said else 10**6, total=10**12)

    def on_event(run_id: str, event: Event) -> None:
        if isinstance(event, RunStatusChanged):
            said.append(event.status)
            if command := {"waiting": "pause-run", "paused": "resume-run"}.get(event.status):
                site.store.commands.add(command, run_id)

    site.on_event = on_event
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)
    monkeypatch.setattr(reduction_base, "shutil", SimpleNamespace(disk_usage=free))
    site.serve()
    first = said.index("paused")
    assert said[first - 1] == "waiting"
    assert said[first + 1 :].count("paused") == 0
    assert said[-1] == "done"
    assert not site.store.commands.pending()


def test_a_second_sum_of_a_round_takes_no_more_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run would take the space of the first sum as soon as it is free."""
    taken = list[Path]()

    def free(folder: Path) -> SimpleNamespace:
        taken.append(folder)
        return SimpleNamespace(free=10**12 if len(taken) == 1 else 10**6, total=10**12)

    monkeypatch.setattr(reduction_base, "shutil", SimpleNamespace(disk_usage=free))
    server: dict[str, Any] = {"reduce": "median", "max_norm": "q0.5"}
    sections: dict[str, Any] = {"run": {"rounds": 1}, "cohort": {"late": "drop"}, "uplink": RAW, "server": server}
    made = Bench(tmp_path, [normed("a", 1e9), *three_honest(), normed("e")], layout=NORMED, **sections)
    row = made.drive()
    assert (row.status, row.status_text) == ("done", "1 round")
    (closed,) = made.events(RoundClosed)
    assert [name.split("/")[1] for name in closed.capped] == ["a"], "it was summed again, with a bound"
    assert np.allclose(params(made), 1.0)
    assert len(taken) == 1


MEETING = threading.Barrier(2)


class Together(CoordinateWise):
    """The median, which each of two runs begins only when the other one does."""

    def of_block(self, rows: Rows) -> Vector:
        MEETING.wait(20.0)
        return np.median(rows, axis=0).astype(np.float32)


OTHER_ROUND = threading.Event()
CLOCK = VirtualClock()  # of the test's service


class Long(CoordinateWise):
    """The median, which takes until another run has opened a round; meanwhile time passes."""

    def of_block(self, rows: Rows) -> Vector:
        for _ in range(100):
            if OTHER_ROUND.wait(0.02):
                return np.median(rows, axis=0).astype(np.float32)
            CLOCK.advance(0.1)
        raise AssertionError("the devices of the run were not free for the other one")


def test_a_long_reduction_keeps_no_device_from_a_run_that_has_used_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_close, "MAX_CLAIM_S", 0.05)
    site = Site(tmp_path, steady(dict.fromkeys("abc", 1.0)))
    monkeypatch.setattr(sys.modules[__name__], "CLOCK", site.clock)
    sections: dict[str, Any] = {"cohort": {"late": "drop"}, "uplink": RAW, "server": {"reduce": f"{__name__}:Long"}}
    other = site.submit(run={"rounds": 3, "seed": 1})
    reduced = site.submit(run={"rounds": 1, "priority": 10.0}, **sections)

    def on_event(run_id: str, event: Event) -> None:
        if run_id == other and isinstance(event, RoundOpened) and event.round == 2:
            OTHER_ROUND.set()

    site.on_event = on_event
    site.serve()
    assert [site.store.run(run_id).status_text for run_id in (reduced, other)] == ["1 round", "3 rounds"]


def test_a_reduction_does_not_stop_the_other_runs(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("abcdef", 1.0)))
    sections: dict[str, Any] = {"cohort": {"clients": 3, "late": "drop"}, "uplink": RAW}
    both = [
        site.submit(run={"rounds": 2, "seed": seed}, server={"reduce": f"{__name__}:Together"}, **sections)
        for seed in range(2)
    ]
    site.serve()
    assert [site.store.run(run_id).status_text for run_id in both] == ["2 rounds", "2 rounds"]
    alone = Site(tmp_path / "alone", steady(dict.fromkeys("abcdef", 1.0)))
    median = alone.submit(run={"rounds": 2, "seed": 0}, server={"reduce": "median"}, **sections)
    alone.serve()
    first = [one for one in site.events(both[0], ModelStored) if one.version == 1]
    of_median = [one for one in alone.events(median, ModelStored) if one.version == 1]
    assert [one.digest for one in first] == [one.digest for one in of_median]
