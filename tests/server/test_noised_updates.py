"""Runs whose clients noise their own updates, on a virtual clock: an equal mean, and the ledger of central mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.server.test_private_rounds import TEXT, Silent, World, change, made_assignment, require_accounted
from tests.support.crashes import LAYOUT, Fate, Outcome, killed, undisturbed_once
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, ModelStored, RoundClosed, RunStatusChanged, UpdateAccepted, UpdateDropped
from thinwire.core.run_events import PrivacyReserved
from thinwire.privacy.accounting import Release
from thinwire.privacy.noise_plan import noise_plan
from thinwire.server.model_store import Versions
from thinwire.simulation import SyntheticUpdates

LOCAL = TEXT.replace('mode = "central"', 'mode = "local"')
PLAN = RunPlan.parse(f"{LOCAL}noise_multiplier = 1.0")


class Locals(World):
    """The devices and the faults of the central runs."""

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan = PLAN, kind: type[SyntheticUpdates] = Silent) -> None:
        super().__init__(folder, fate, plan, kind)


undisturbed = undisturbed_once(Locals)


def test_each_round_is_reserved_with_the_release_of_one_device(undisturbed) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    assert [e.reason for e in made.of(RoundClosed)] == ["all", "deadline", "all"]
    releases = {Release.from_json(event.release) for event in made.of(PrivacyReserved)}
    assert releases == {noise_plan(PLAN, LAYOUT.model_size, 1).release}
    require_accounted(made, PLAN)
    for event in made.of(UpdateAccepted):
        assert not any(event.header[name] for name in ("examples", "steps", "a", "norm", "metrics", "counters"))


def test_a_crash_anywhere_spends_each_round_once(undisturbed, tmp_path: Path) -> None:
    _, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.status == "done", where
        assert [event.round for event in again.of(RoundClosed)] == [1, 2, 3], where
        require_accounted(again, PLAN)

    killed(Locals, tmp_path, places, check, slice(0, None, 4))


def test_the_model_moves_by_the_plain_mean_of_what_the_clients_sent(tmp_path: Path) -> None:
    """The scripted clients send updates above the clip: the aggregator clips nothing and adds no noise."""
    plan = RunPlan.parse(f"{LOCAL}noise_multiplier = 1.0".replace("rounds = 3", "rounds = 1"))
    made = Locals(tmp_path, Fate(), plan).live()
    params, _ = Versions(made.folder, LAYOUT, durable=False).read(made.of(ModelStored)[-1])
    mean = sum(change(name, made_assignment()).astype(np.float64) for name in "abcde") / 5
    assert params == pytest.approx(mean, abs=1e-5)


def test_a_late_update_is_aggregated_and_one_that_is_not_readable_is_dropped(tmp_path: Path) -> None:
    late = LOCAL.replace('late = "drop"', 'late = "aggregate"').replace("deadline_s = 40", "deadline_s = 59")
    plan = RunPlan.parse(f"{late}noise_multiplier = 1.0")
    made = Locals(tmp_path, Fate(), plan).live()
    assert made.status == "done"
    assert any(event.staleness > 0 for event in made.of(UpdateAccepted))
    assert {e.reason.partition(":")[0] for e in made.of(UpdateDropped)} == {"bad-payload"}


def test_a_reply_that_tells_more_than_the_update_is_refused(tmp_path: Path) -> None:
    plan = RunPlan.parse(f"{LOCAL}noise_multiplier = 1.0".replace("wait_for = 5", "wait_for = 5\nwait_s = 60"))
    made = Locals(tmp_path, Fate(), plan, SyntheticUpdates).live()
    assert not made.of(UpdateAccepted)
    assert {event.kind for event in made.of(ClientFailed)} >= {"protocol"}


def test_steps_with_noise_cost_what_the_plan_says_whatever_a_device_has(tmp_path: Path) -> None:
    steps = TEXT.replace('mode = "central"', 'mode = "example"\nrecords = 20000').replace("1e-3", "1e-5")
    plan = RunPlan.parse(f"{steps}noise_multiplier = 1.0")
    made = Locals(tmp_path, Fate(), plan).live()
    assert made.status == "done"
    (release,) = {Release.from_json(event.release) for event in made.of(PrivacyReserved)}
    assert (release.unit, release.steps, release.rate) == ("record", 1, 32 / 20000)
    require_accounted(made, plan)


def test_a_run_ends_when_its_clients_have_taken_part_as_often_as_planned(tmp_path: Path) -> None:
    plan = RunPlan.parse(f"{LOCAL}noise_multiplier = 1.0\nmax_participations = 2")
    made = Locals(tmp_path, Fate(), plan).live()
    assert len(made.of(RoundClosed)) == 2
    assert made.of(RunStatusChanged)[-1].exit_code == 7
