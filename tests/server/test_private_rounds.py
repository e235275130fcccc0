"""Runs with central differential privacy on a virtual clock: what is spent stays spent, and a sum is noised once."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.store.test_privacy_ledger import enrol, reserve
from tests.support import crashes
from tests.support.crashes import LAYOUT, Fate, Outcome, Whole, killed, undisturbed_once
from tests.support.faulty_fleet import AttentiveDevice, FaultyBehavior
from tests.support.store_story import new_run
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, ModelStored, RoundClosed, RunStatusChanged, UpdateAccepted, UpdateDropped
from thinwire.core.fleet import Delivery, Hello, population_key
from thinwire.core.protocol import without_facts
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, ReplyHeader, Vector
from thinwire.privacy.accounting import Release
from thinwire.privacy.accounting import epsilon as epsilon_of
from thinwire.privacy.noise_plan import noise_plan
from thinwire.server import round_close
from thinwire.server.model_store import Versions
from thinwire.server.privacy_budget import MAX_PARTICIPATIONS, PLANNED, PrivacyBudget
from thinwire.server.private_mode import CentralMode
from thinwire.simulation import SyntheticUpdates
from thinwire.simulation.scripted_device import Behavior, ReplyWithParts
from thinwire.store import Store
from thinwire.store.privacy_ledger import PrivacyLedger

TEXT = """
[run]
task = "toy"
rounds = 3
evaluate = "off"
[cohort]
clients = 5
wait_for = 5
min_updates = 1
deadline_s = 40
late = "drop"
[local]
lr = 1.0
steps = 1
buffers = "local"
[uplink]
codec = "identity"
[privacy]
mode = "central"
clip = 2.0
delta = 1e-3
"""
PLAN = RunPlan.parse(TEXT + "noise_multiplier = 1.0")
CHEAP = noise_plan(PLAN, LAYOUT.model_size, 1).release.to_json()


def change(name: str, assignment: Assignment) -> Vector:
    drawn: Vector = np.random.default_rng([ord(name), assignment.round]).standard_normal(LAYOUT.size).astype(np.float32)
    return drawn


class Silent(SyntheticUpdates):
    """Replies as a client of a private run does: without a fact of its data beside the update."""

    def finish(self, delivery: Delivery, behavior: Behavior) -> ReplyWithParts:
        header, body = super().finish(delivery, behavior)
        assert isinstance(header, ReplyHeader)
        return without_facts(header), body


class World(crashes.World):
    """Five devices; in round 2 one of them sends garbage, and one misses the deadline."""

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan = PLAN, kind: type[SyntheticUpdates] = Silent) -> None:
        devices = [
            AttentiveDevice(name, kind(name, LAYOUT, partial(change, name)), partial(self.behavior, name))
            for name in "abcde"
        ]
        super().__init__(folder, fate, plan, devices)

    def behavior(self, name: str, assignment: Assignment) -> Behavior:
        if (assignment.round, name) == (2, "b"):
            return FaultyBehavior(compute_s=2.0, garbage=True)
        return Behavior(compute_s=60.0 if (assignment.round, name) == (2, "d") else 2.0)


undisturbed = undisturbed_once(World)


def require_accounted(made: Outcome, plan: RunPlan = PLAN) -> None:
    """Every round is reserved once, every released model is committed, and lies on the disk as it was released."""
    reserved, committed, stored = made.of(PrivacyReserved), made.of(PrivacyCommitted), made.of(ModelStored)[1:]
    rounds = [event.round for event in made.of(RoundClosed)]
    assert [event.round for event in reserved] == rounds
    assert [event.digest for event in committed] == [event.digest for event in stored]
    versions = Versions(made.folder, LAYOUT, durable=False)
    kept = [event for event in stored if versions.path(event.version).exists()]
    assert stored[-1:] == kept[-1:]
    for event in kept:
        versions.read(event)  # raises if its digest is another
    assert not list(made.folder.glob("*.hidden"))
    assert not list(made.folder.glob(".*.hidden"))
    with Store.open(AggregatorHome(made.folder.parents[1]).database) as store:
        entries = store.privacy.rows("toy")
        assert [(one.round, one.state, one.digest) for one in entries] == [
            (number, "committed", event.digest) for number, event in zip(rounds, committed, strict=True)
        ]
        spent = store.privacy.spent_by_device("toy")
        assert Counter({client: sum(of.values()) for client, of in spent.items()}) == Counter(
            device for one in entries for device in one.devices
        )
        (release,) = {Release.from_json(text) for of in spent.values() for text in of}
    assert release == noise_plan(plan, LAYOUT.model_size, 1).release


def test_each_round_is_reserved_when_it_opens_and_committed_when_its_model_is_stored(undisturbed: Whole) -> None:
    made, places = undisturbed
    assert made.status == "done"
    assert [e.reason for e in made.of(RoundClosed)] == ["all", "deadline", "all"]
    assert [len(e.devices) for e in made.of(PrivacyReserved)] == [5, 5, 4], "one is still busy with round 2"
    assert {e.reason.partition(":")[0] for e in made.of(UpdateDropped)} == {"bad-payload"}
    assert {"append", "commit", "fsync"} == set(places)
    require_accounted(made)


def test_nothing_of_a_client_is_recorded_but_presence_bytes_and_time(undisturbed: Whole) -> None:
    made, _ = undisturbed
    for event in made.of(UpdateAccepted):
        header = event.header
        assert not any(
            header[name] for name in ("examples", "steps", "a", "norm", "residual_norm", "metrics", "counters")
        )
        assert not any(header["timings"].values())
    assert all(not event.metrics for event in made.of(RoundClosed))
    told = [event.header for kind in (UpdateAccepted, UpdateDropped) for event in made.of(kind)]
    digests = {part["sha256"] for header in told for part in header["parts"]}
    assert digests == {""}, "who guesses an update could confirm the guess by its digest"


def test_a_crash_anywhere_spends_each_round_once_and_releases_the_same_bytes_again(
    undisturbed: Whole, tmp_path: Path
) -> None:
    _, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.status == "done", where
        assert [event.round for event in again.of(RoundClosed)] == [1, 2, 3], where
        require_accounted(again)

    killed(World, tmp_path, places, check)


def test_nothing_unfinished_or_unreadable_of_a_client_outlives_its_round(tmp_path: Path) -> None:
    """A late upload, and a reply that a disk damaged: in central mode each has a client's update in the clear."""
    world = World(tmp_path, Fate())
    left = [world.home.spool / place for place in ("toy-1/.partial-d-2-ab", ".unreadable/toy-1/b-2.reply")]
    others = [world.home.spool / place for place in ("toy-2/.partial-d-2-ab", ".unreadable/toy-2/b-2.reply")]
    for path in (*left, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"an update")
    seen, close = list[bool](), round_close.finish

    def closed(one: Any) -> None:
        close(one)
        seen.append(any(path.exists() for path in left))

    with patch("thinwire.server.run.finish", closed):
        assert world.live().status == "done"
    assert seen == [False] * 3
    assert all(path.exists() for path in others)


def test_a_device_that_has_brought_spending_is_excluded_alone_with_the_command_that_charges_it(tmp_path: Path) -> None:
    """A forgotten device that joined again: the run goes on with the others, and with it once a person charged it."""
    budget, ledger = PrivacyBudget(PLAN), {"a": {CHEAP: 1}, "b": {}}
    barred = {"b": "has 2 releases of toy in its own ledger from an enrolment that is not known here"}
    privacy = SimpleNamespace(
        bearers=dict, rows=lambda population: [], spent_by_device=lambda *_: ledger, excluded=lambda population: barred
    )
    running: Any = SimpleNamespace(
        simulated=False, store=SimpleNamespace(privacy=privacy), online=SimpleNamespace(names=["a", "b"]),
        run_state=SimpleNamespace(rounds_opened=0),
    )  # fmt: skip
    release = Release.from_json(CHEAP)
    assert budget.excluded(running, "a", release) == ""
    assert budget.excluded(running, "b", release) == barred["b"]
    barred = {}
    running.online.names = ["a", "b", "c"]  # somebody registers: the ledger is read again
    assert budget.excluded(running, "b", release) == ""


def test_a_device_that_joins_again_under_another_name_keeps_the_rounds_of_this_run(tmp_path: Path) -> None:
    plan = RunPlan.parse(f"{TEXT}noise_multiplier = 1.0\nmax_participations = 2")
    budget, release = PrivacyBudget(plan), Release.from_json(CHEAP)
    with Store.open(tmp_path / "store.sqlite3", durable=False) as store:
        enrol(store, "pi-01", "pi-02")
        run_id = new_run(store)
        for number in (1, 2):
            reserve(store, run_id, number, population="toy", release=CHEAP, devices=("pi-01", "pi-02"))
        running: Any = SimpleNamespace(
            simulated=False, store=store, run_id=run_id, online=SimpleNamespace(names=["pi-01", "pi-02"]),
            run_state=SimpleNamespace(rounds_opened=2),
        )  # fmt: skip
        assert budget.excluded(running, "pi-01", release) == MAX_PARTICIPATIONS.format(2)
        unbounded = RunPlan.parse(f"{TEXT}noise_multiplier = 1.0".replace("rounds = 3", "rounds = 2"))
        assert PrivacyBudget(unbounded).excluded(running, "pi-01", release) == PLANNED.format(2), "no key says 2"
        store.roster.leave("pi-01")
        enrol(store, "ward-1")
        key = store.roster.rows()[0].fingerprint
        said = Hello("ward-1", "p1", booked={population_key("toy"): 2}, booked_keys=(key,))
        store.roster.seen(said, 1.0)
        running.online.names = ["pi-02", "ward-1"]
        assert "has taken part in 2 rounds" in budget.excluded(running, "ward-1", release)


def test_a_run_stops_before_its_budget_is_passed(tmp_path: Path) -> None:
    release = noise_plan(PLAN, LAYOUT.model_size, 1).release
    two, three = (epsilon_of({release: rounds}, 1e-3) for rounds in (2, 3))
    plan = RunPlan.parse(f"{TEXT}noise_multiplier = 1.0\nbudget = {(two + 3 * three) / 4}")
    made = World(tmp_path, Fate(), plan).live()
    assert made.status == "failed"
    assert len(made.of(RoundClosed)) == 2
    end = made.of(RunStatusChanged)[-1]
    assert end.exit_code == 7
    assert "budget" in end.text
    assert "may still spend" in end.text
    require_accounted(made, plan)


def test_a_run_whose_budget_is_spent_ends_also_after_a_restart_before_its_devices_are_back(tmp_path: Path) -> None:
    release = noise_plan(PLAN, LAYOUT.model_size, 1).release
    two, three = (epsilon_of({release: rounds}, 1e-3) for rounds in (2, 3))
    plan = RunPlan.parse(f"{TEXT}noise_multiplier = 1.0\nbudget = {(two + 3 * three) / 4}")
    World(tmp_path / "undisturbed", fate := Fate(), plan).live()
    for place in range(len(fate.places) - 3, len(fate.places) + 1):
        made = World(tmp_path / f"killed at {place}", Fate(place), plan).live()
        assert (made.status, made.of(RunStatusChanged)[-1].exit_code) == ("failed", 7), fate.places[place - 1]


def test_a_budget_smaller_than_one_round_ends_the_run_before_anybody_is_waited_for(tmp_path: Path) -> None:
    made = World(tmp_path, Fate(), RunPlan.parse(f"{TEXT}noise_multiplier = 1.0\nbudget = 0.1")).live()
    end = made.of(RunStatusChanged)[-1]
    assert (made.status, end.exit_code) == ("failed", 7)
    assert re.search(r"one round costs epsilon [\d.]+ at delta = .* and \[privacy\] budget = 0.1", end.text), end.text
    assert not made.of(PrivacyReserved)


@pytest.mark.parametrize(("delta", "status"), [(0.2, "failed"), (0.19, "done")])
def test_a_run_spends_nothing_if_delta_is_not_below_one_over_the_clients_that_are_here(
    tmp_path: Path, delta: float, status: str
) -> None:
    """A round selects three of five clients, so the plan alone does not tell how many there are."""
    text = TEXT.replace("clients = 5", "clients = 3").replace("delta = 1e-3", f"delta = {delta}")
    made = World(tmp_path, Fate(), RunPlan.parse(text + "noise_multiplier = 1.0")).live()
    assert made.status == status
    assert bool(made.of(PrivacyReserved)) == (status == "done")
    end = made.of(RunStatusChanged)[-1]
    assert ("[privacy] delta = 0.2 with 5 clients" in end.text, end.exit_code) == (
        (True, 3) if status == "failed" else (False, 0)
    )


def test_a_round_is_not_opened_if_another_run_has_spent_meanwhile(tmp_path: Path) -> None:
    """The ledger is read again for each round: what was left when the run began may be gone."""
    release = noise_plan(PLAN, LAYOUT.model_size, 1).release
    budget = epsilon_of({release: 4}, 1e-3)
    plan = RunPlan.parse(f"{TEXT}noise_multiplier = 1.0\nbudget = {budget}")
    read = PrivacyLedger.spent_by_device

    def spent(ledger: PrivacyLedger, population: str, *more: Any) -> dict[str, dict[str, int]]:
        """Return as many releases of another run as of this one."""
        found = read(ledger, population, *more)
        return {device: {text: 2 * count for text, count in own.items()} for device, own in found.items()}

    with patch.object(PrivacyLedger, "spent_by_device", spent):
        made = World(tmp_path, Fate(), plan).live()
    assert len(made.of(RoundClosed)) == 2
    assert made.of(RunStatusChanged)[-1].exit_code == 7


def test_no_client_takes_part_in_more_rounds_than_the_plan_allows(tmp_path: Path) -> None:
    made = World(tmp_path, Fate(), RunPlan.parse(f"{TEXT}noise_multiplier = 1.0\nmax_participations = 2")).live()
    assert len(made.of(RoundClosed)) == 2
    assert made.of(RunStatusChanged)[-1].exit_code == 7


def test_a_reply_that_tells_more_than_the_update_is_refused(tmp_path: Path) -> None:
    plan = RunPlan.parse(f"{TEXT}noise_multiplier = 1.0".replace("wait_for = 5", "wait_for = 5\nwait_s = 60"))
    made = World(tmp_path, Fate(), plan, SyntheticUpdates).live()
    assert not made.of(UpdateAccepted)
    assert {event.kind for event in made.of(ClientFailed)} >= {"protocol"}


def test_the_model_moves_by_the_clipped_mean_and_by_noise_of_the_plan(tmp_path: Path) -> None:
    """With almost no noise the step is the sum of the clipped updates, divided by the five selected clients."""
    plan = RunPlan.parse(f"{TEXT}noise_multiplier = 0.01".replace("rounds = 3", "rounds = 1"))
    made = World(tmp_path, Fate(), plan).live()
    params, _ = Versions(made.folder, LAYOUT, durable=False).read(made.of(ModelStored)[-1])
    first = replace(made_assignment(), round=1)
    updates = [change(name, first).astype(np.float64) for name in "abcde"]
    mean = sum(one * min(1.0, 2.0 / float(np.linalg.norm(one))) for one in updates) / 5
    noise = 0.01 * 2.0 / 5
    assert np.abs(params - mean).max() < 6 * noise + 1e-3
    assert math.isclose(float(np.linalg.norm(mean)), float(np.linalg.norm(params)), rel_tol=0.1)


def test_a_source_of_randomness_that_fails_releases_nothing(tmp_path: Path) -> None:
    with (
        patch("thinwire.server.private_mode.SystemRng.fill", side_effect=OSError("no entropy")),
        pytest.raises(OSError),
    ):
        World(tmp_path, Fate()).live()
    assert not list(tmp_path.rglob("v000001*"))


def made_assignment() -> Assignment:
    return Assignment("toy-1.1.a", "toy-1", "toy", "train", "", 1)


def test_a_start_deletes_what_a_kill_left_of_a_noised_model_half_written(tmp_path: Path) -> None:
    kept = ["fixed", "v000001.model"]
    for name in (*kept, ".v000002.model.hidden", ".v000002.state.hidden.x7_q2", "v000002.model.hidden"):
        (tmp_path / name).write_bytes(b"noised")
    versions = Versions(tmp_path, LAYOUT, durable=False)
    running: Any = SimpleNamespace(versions=versions, run_state=SimpleNamespace(version=1))
    CentralMode(PLAN).reveal(running, starts=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
