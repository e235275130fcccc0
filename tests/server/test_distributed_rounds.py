"""Runs whose clients add noise under masks, on a virtual clock: each round is spent once, whoever dies where."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.server.test_secure_rounds import World as SecureWorld
from tests.server.test_secure_rounds import survivors
from tests.support.crashes import LAYOUT, Fate, Outcome, Whole, killed, undisturbed_once
from tests.support.secure_fleet import toy_plan
from thinwire.aggregation.plan_codecs import noised_dimensions
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored, RoundClosed, RunStatusChanged
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved, SumUnmasked
from thinwire.core.statedir import AggregatorHome
from thinwire.privacy.accounting import Release
from thinwire.privacy.accounting import epsilon as epsilon_of
from thinwire.privacy.noise_plan import noise_plan
from thinwire.privacy.samplers import TableSampler
from thinwire.server.model_store import Versions
from thinwire.store import Store

EVERY = 2  # of them is tried: test_secure_rounds and test_private_rounds try each place of their own mode
TEXT = f"""{toy_plan("max_dropout = 0.4")}
[privacy]
mode = "distributed"
clip = 2.0
noise_multiplier = 1.0
delta = 1e-3
"""
PLAN = RunPlan.parse(TEXT)


class World(SecureWorld):
    """Five devices, of which some leave a round in some phase, as in the runs without noise."""

    rounds = PLAN


undisturbed = undisturbed_once(World)


def require_accounted(made: Outcome, plan: RunPlan = PLAN) -> None:
    """Each round is reserved for all five, each released model is committed, and lies there as it was released."""
    reserved, committed, stored = made.of(PrivacyReserved), made.of(PrivacyCommitted), made.of(ModelStored)[1:]
    assert [event.round for event in reserved] == [event.round for event in made.of(RoundClosed)]
    assert [event.digest for event in committed] == [event.digest for event in stored]
    assert all(sorted(event.devices) == list("abcde") for event in reserved), "who drops out has spent too"
    versions = Versions(made.folder, LAYOUT, durable=False)
    versions.read(stored[-1])
    assert not list(made.folder.glob("*.hidden"))
    with Store.open(AggregatorHome(made.folder.parents[1]).database) as store:
        spent = store.privacy.spent_by_device("toy")
    assert Counter({client: sum(of.values()) for client, of in spent.items()}) == Counter(
        device for event in reserved for device in event.devices
    )
    (release,) = {Release.from_json(text) for of in spent.values() for text in of}
    assert release == noise_plan(plan, noised_dimensions(plan, LAYOUT.model_size), 5).release


def require_noised(made: Outcome, plan: RunPlan = PLAN) -> None:
    """Each round has its sum, and the sum has the noise of the clients that are in it."""
    assert made.status == "done"
    assert [survivors(made, number) for number in (1, 2, 3)] == [list("abcde"), list("abce"), list("bcde")]
    require_accounted(made, plan)
    noise = noise_plan(plan, noised_dimensions(plan, LAYOUT.model_size), 5)
    for event in made.of(SumUnmasked):
        assert (event.clip, event.next_clip) == (2.0, 2.0)
        expected = np.sqrt(event.survivors * noise.variance * LAYOUT.model_size) * 2.0 / noise.scale / 5
        assert event.norm == pytest.approx(expected, rel=0.5), "the noise is far above the update"


def test_each_round_is_reserved_and_committed_and_its_sum_has_the_clients_noise(undisturbed: Whole) -> None:
    require_noised(undisturbed[0])


def test_a_run_whose_clients_add_discrete_gaussians_is_charged_for_their_sum(tmp_path: Path) -> None:
    """A sum of discrete Gaussians is none, so it costs more than one of the same variance."""

    class Gaussians(World):
        rounds = RunPlan.parse(f'{TEXT}mechanism = "discrete-gaussian"\n')

    require_noised(Gaussians(tmp_path, Fate()).live(), Gaussians.rounds)
    noise = noise_plan(Gaussians.rounds, noised_dimensions(Gaussians.rounds, LAYOUT.model_size), 5)
    assert noise.release.distribution == "discrete-gaussian-sum"
    assert noise.sampler.digest == TableSampler.discrete_gaussian(noise.variance).digest


def test_a_crash_anywhere_spends_each_round_once_and_releases_the_same_bytes(
    undisturbed: Whole, tmp_path: Path
) -> None:
    made, places = undisturbed
    expected = [event.digest for event in made.of(ModelStored)]

    def check(again: Outcome, where: str) -> None:
        assert again.status == "done", where
        assert [event.digest for event in again.of(ModelStored)] == expected, where
        assert not (again.folder / "secure").exists(), where
        require_accounted(again)

    killed(World, tmp_path, places, check, slice(0, None, EVERY))


def test_a_run_stops_before_its_budget_is_passed(tmp_path: Path) -> None:
    release = noise_plan(PLAN, noised_dimensions(PLAN, LAYOUT.model_size), 5).release
    two, three = (epsilon_of({release: rounds}, 1e-3) for rounds in (2, 3))

    class Tight(World):
        rounds = RunPlan.parse(f"{TEXT}budget = {(two + 3 * three) / 4}")

    made = Tight(tmp_path, Fate()).live()
    assert made.status == "failed"
    assert len(made.of(RoundClosed)) == 2
    assert made.of(RunStatusChanged)[-1].exit_code == 7
    require_accounted(made, Tight.rounds)


def test_a_round_with_too_few_survivors_reveals_nothing_and_stays_spent(tmp_path: Path) -> None:
    """The cost counts on the fewest honest survivors, so a sum of fewer is never unmasked."""

    class Strict(World):
        rounds = RunPlan.parse(TEXT.replace("max_dropout = 0.4", "max_dropout = 0.0\nmin_survivors = 5"))

    made = Strict(tmp_path, Fate()).live()
    closed = made.of(RoundClosed)
    assert [event.reason for event in closed[:3]] == ["all", "too-few", "too-few"]
    assert len(made.of(SumUnmasked)) == len(made.of(PrivacyCommitted)) == sum(e.reason == "all" for e in closed)
    assert len(made.of(PrivacyReserved)) == len(closed)


def test_a_run_whose_noise_needs_all_clients_says_that_it_waits_for_more(tmp_path: Path) -> None:
    """Nobody is busy while it waits: one client is away."""

    class Away(World):
        def __init__(self, folder: Path, fate: Fate) -> None:
            super().__init__(folder, fate)
            self.fleet.crash("a", after_s=3.0)
            self.fleet.connect("a", after_s=200.0)

    made = Away(tmp_path, Fate()).live()
    assert len(made.of(RoundClosed)) == 3, "it went on when the client was back"
    texts = [event.text for event in made.of(RunStatusChanged)]
    assert "waiting until more devices can be selected" in texts
    assert not [text for text in texts if "busy" in text]
    require_accounted(made)
