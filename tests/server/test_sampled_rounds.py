"""Rounds with Poisson sampling on a virtual clock: secret coins alone decide who is in one, and nothing shows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.server.test_private_rounds import TEXT, Silent, change
from tests.support import crashes
from tests.support.crashes import LAYOUT, Fate, Killed, Outcome, Whole, killed, undisturbed_once
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.server_bench import Bench, every, killing
from thinwire.core import RunPlan, plan_privacy_rules
from thinwire.core.errors import Refused
from thinwire.core.events import (
    ClientFailed,
    ClientSelected,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunNoted,
    RunStatusChanged,
)
from thinwire.core.prng import SecretRng
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved, without_sample
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment
from thinwire.privacy.accounting import Budget, Release
from thinwire.privacy.accounting import epsilon as epsilon_of
from thinwire.privacy.noise_plan import noise_plan, spending
from thinwire.privacy.secret_rng import SystemRng
from thinwire.server import private_mode
from thinwire.server.model_store import Versions
from thinwire.server.policy.cohort import poisson_sample
from thinwire.simulation.scripted_device import Behavior
from thinwire.store import Store

RATE = 0.4
SAMPLED = TEXT.replace("clients = 5\n", "").replace("min_updates = 1\n", "") + f"sampling_rate = {RATE}\n"
PLAN = RunPlan.parse(f"{SAMPLED}noise_multiplier = 1.0")
SHORT = RunPlan.parse(f"{SAMPLED}noise_multiplier = 1.0".replace("rounds = 3", "rounds = 1"))
NAMES = tuple("abcde")


class World(crashes.World):
    """Five devices; one of them misses each deadline."""

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan = PLAN) -> None:
        devices = [
            AttentiveDevice(name, Silent(name, LAYOUT, partial(change, name)), partial(self.behavior, name))
            for name in NAMES
        ]
        super().__init__(folder, fate, plan, devices)

    def behavior(self, name: str, assignment: Assignment) -> Behavior:
        return Behavior(compute_s=300.0 if name == "d" else 2.0)


def of_coins(*samples: str) -> Any:
    """Let the coins of each round give the next of these samples; a round that draws twice takes two."""
    left = iter(samples)
    return patch.object(private_mode, "poisson_sample", lambda population, rate, rng: tuple(next(left)))


undisturbed = undisturbed_once(World)


def require_accounted(made: Outcome, plan: RunPlan = PLAN) -> None:
    """Each round is spent once by everyone, at the rate, and every model of a round is released."""
    opened, reserved = made.of(RoundOpened), made.of(PrivacyReserved)
    assert [event.round for event in reserved] == [event.round for event in opened]
    assert [event.digest for event in made.of(PrivacyCommitted)] == [e.digest for e in made.of(ModelStored)[1:]]
    assert opened[0].added == list(NAMES)
    assert not any(event.added or event.removed for event in opened[1:]), "the population stays as it was"
    assert len({name for event in opened for name in event.assignments} | set(NAMES)) == len(NAMES)
    release = noise_plan(plan, LAYOUT.model_size, 1).release
    assert release.rate == RATE
    with Store.open(AggregatorHome(made.folder.parents[1]).database) as store:
        entries = store.privacy.rows("toy")
        assert [(one.round, one.state, one.devices) for one in entries] == [
            (event.round, "committed", ()) for event in opened
        ]
        spent = store.privacy.spent_by_device("toy", NAMES)
    assert spent == {name: {release.to_json(): len(opened)} for name in NAMES}, "sampled or not, each one pays"


def test_every_round_ends_at_its_deadline_and_releases_a_model(undisturbed: Whole) -> None:
    made, _ = undisturbed
    closed = made.of(RoundClosed)
    assert made.status == "done"
    assert {(event.reason, event.seconds) for event in closed} == {("deadline", PLAN.cohort.deadline_s)}
    assert [event.version for event in closed] == [1, 2, 3]
    require_accounted(made)


@pytest.mark.parametrize("sample", ["", "abcde"])
def test_a_round_is_the_same_to_others_whether_nobody_or_everybody_was_sampled(tmp_path: Path, sample: str) -> None:
    with of_coins(sample, sample, sample):
        made = World(tmp_path, Fate()).live()
    assert [set(event.assignments) for event in made.of(RoundOpened)] == [set(sample)] * 3
    told = [one for one in map(without_sample, made.events) if one is not None]
    assert all(one.at == int(one.at) for one in told), "the end of a round and what follows take longer for more"
    shown = [json.dumps(vars(one), default=str) for one in told]
    assert made.status == "done"
    assert [(e.reason, e.seconds, e.version) for e in made.of(RoundClosed)] == [
        ("deadline", PLAN.cohort.deadline_s, number) for number in (1, 2, 3)
    ]
    assert not [text for text in shown for name in NAMES if f"toy-1.1.{name}" in text or f"/{name}/" in text]
    require_accounted(made)


def test_an_empty_sample_is_released_as_noise_of_the_plan(tmp_path: Path) -> None:
    plan = RunPlan.parse(f"{SAMPLED}noise_multiplier = 1.0".replace("rounds = 3", "rounds = 1"))
    with of_coins(""):
        made = World(tmp_path, Fate(), plan).live()
    params, _ = Versions(made.folder, LAYOUT, durable=False).read(made.of(ModelStored)[-1])
    deviation = 2.0 / (RATE * len(NAMES))
    assert 0.4 * deviation < float(np.std(params)) < 2 * deviation
    assert np.count_nonzero(params) > 20, "of 28 draws, with a deviation of 256 grid steps"


def test_the_sum_is_divided_by_the_expected_cohort_whatever_the_sample_is(tmp_path: Path) -> None:
    plan = RunPlan.parse(f"{SAMPLED}noise_multiplier = 0.01".replace("rounds = 3", "rounds = 1"))
    with of_coins("ab"):
        made = World(tmp_path, Fate(), plan).live()
    params, _ = Versions(made.folder, LAYOUT, durable=False).read(made.of(ModelStored)[-1])
    first = Assignment("toy-1.1.a", "toy-1", "toy", "train", "", 1)
    updates = [change(name, first).astype(np.float64) for name in "ab"]
    total = sum(one * min(1.0, 2.0 / float(np.linalg.norm(one))) for one in updates)
    expected = RATE * len(NAMES)
    assert np.abs(params - total / expected).max() < 6 * 0.01 * 2.0 / expected + 1e-3


def test_a_client_that_is_late_is_given_up_and_has_a_coin_in_the_next_round(tmp_path: Path) -> None:
    with of_coins("d", "d", "d"):
        made = World(tmp_path, Fate()).live()
    assert [list(event.assignments) for event in made.of(RoundOpened)] == [["d"]] * 3
    assert [event.kind for event in made.of(ClientFailed)][:2] == ["stale", "stale"]
    assert not any(event.aggregated for event in made.of(RoundClosed))
    assert made.status == "done"


def test_an_absent_device_has_a_coin_and_is_only_absent(tmp_path: Path) -> None:
    """The population is the roster: presence when a round opens changes nothing."""
    with (
        patch.object(private_mode.SampledMode, "population", lambda mode, running: [*NAMES, "z"]),
        of_coins("az", "z", "a"),
    ):
        made = World(tmp_path, Fate()).live()
    assert [list(event.assignments) for event in made.of(RoundOpened)] == [["a", "z"], ["z"], ["a"]]
    assert [len(event.aggregated) for event in made.of(RoundClosed)] == [1, 0, 1]
    assert {event.device for event in made.of(ClientSelected)} == {"a", "z"}


def enrol(database: Path, name: str) -> None:
    with Store.open(database) as store:
        store.roster.enrol(name, hashlib.sha256(name.encode()).hexdigest(), name.encode(), "loopback")


def test_the_population_is_everyone_enrolled_at_the_start_and_stays_so(tmp_path: Path) -> None:
    world, populations = World(tmp_path, Fate()), list[tuple[str, ...]]()
    enrol(world.home.database, "never-there")

    def coins(population: Sequence[str], rate: float, rng: SecretRng) -> tuple[str, ...]:
        populations.append(tuple(population))
        enrol(world.home.database, f"later-{len(populations)}")
        return poisson_sample(population, rate, rng)

    with patch.object(private_mode, "poisson_sample", coins):
        made = world.live()
    assert populations == [(*NAMES, "never-there")] * 3
    assert made.of(RoundOpened)[0].added == [*NAMES, "never-there"]
    assert made.of(RunNoted)[0].note[0][1] == {"rate": RATE, "population": 6, "expected": RATE * 6}
    with Store.open(world.home.database) as store:
        assert {"later-1", "later-3"} <= {row.name for row in store.roster.rows()}


def test_no_device_is_renamed_while_a_sampled_run_goes_on(tmp_path: Path) -> None:
    """A refusal for some devices alone would tell who was sampled."""
    world, refused = World(tmp_path, Fate()), list[str]()

    def coins(population: Sequence[str], rate: float, rng: SecretRng) -> tuple[str, ...]:
        with Store.open(world.home.database) as store, pytest.raises(Refused) as caught:
            store.roster.rename("e", "z")
        refused.append(caught.value.what)
        return ("a",)

    with patch.object(private_mode, "poisson_sample", coins):
        assert world.live().status == "done"
    assert refused == ["e may take part in toy-1, which is not over"] * 3
    with Store.open(world.home.database) as store:
        store.roster.rename("e", "z")


def test_a_crash_anywhere_keeps_the_sample_that_was_drawn(undisturbed: Whole, tmp_path: Path) -> None:
    """A round's coins are drawn once: in the transaction that opens it, or never seen."""
    _, places = undisturbed
    drawn = list[tuple[str, ...]]()

    def noted(population: Any, rate: float, rng: Any) -> tuple[str, ...]:
        drawn.append(poisson_sample(population, rate, rng))
        return drawn[-1]

    def check(again: Outcome, where: str) -> None:
        assert again.status == "done", where
        assert [event.round for event in again.of(RoundClosed)] == [1, 2, 3], where
        require_accounted(again)
        samples, draws = [tuple(event.assignments) for event in again.of(RoundOpened)], iter(drawn)
        assert len(samples) == 3, where
        assert all(sample in draws for sample in samples), f"{where}: these draws, in their order"
        assert len(drawn) <= 4, f"{where}: at most one draw was lost with its process"

    with patch.object(private_mode, "poisson_sample", noted):
        killed(World, tmp_path, places, check)


@pytest.mark.parametrize("sample", ["ab", "abc"])
def test_a_run_that_waits_for_devices_after_a_restart_names_its_population_and_no_sample(
    tmp_path: Path, sample: str
) -> None:
    devices = [AttentiveDevice(name, Silent(name, LAYOUT, partial(change, name)), every(1.0)) for name in NAMES]
    sections = {name: table for name, table in SHORT.to_json().items() if name != "plan_version"}
    bench = Bench(tmp_path, devices, layout=LAYOUT, **sections)
    with of_coins(sample), pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, RoundClosed)))
    bench.restart()
    bench.fleet.crash("b")
    bench.fleet.crash("c")
    bench.fleet.poll(0.0)
    bench.restart()
    assert bench.drive().status == "done"
    waited = [event.text for event in bench.events(RunStatusChanged) if event.status == "waiting"]
    assert waited == ["waiting for 5 devices to reconnect (a, b, c, d, e)"], "nobody has called yet"


def test_a_sampled_run_spends_nothing_if_delta_is_not_below_one_over_the_population(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_privacy_rules, "FEWEST", 4)  # clients that a plan without a number has at least
    made = World(tmp_path, Fate(), RunPlan.parse(SAMPLED.replace("1e-3", "0.2") + "noise_multiplier = 1.0")).live()
    assert made.status == "failed"
    assert not made.of(PrivacyReserved)
    assert "[privacy] delta = 0.2 with 5 clients" in made.of(RunStatusChanged)[-1].text


def test_a_run_stops_before_the_budget_of_any_client_of_the_population_is_passed(tmp_path: Path) -> None:
    release = noise_plan(PLAN, LAYOUT.model_size, 1).release
    most = 1.001 * epsilon_of({release: 2}, 1e-3)
    fits = Budget(most, 1e-3, release)
    assert fits.allows({release: 0}, release)
    plan = RunPlan.parse(f"{SAMPLED}noise_multiplier = 1.0\nbudget = {most}")
    made = World(tmp_path, Fate(), plan).live()
    rounds = len(made.of(RoundClosed))
    assert fits.allows({release: rounds - 1}, release)
    assert not fits.allows({release: rounds}, release)
    assert made.of(RunStatusChanged)[-1].exit_code == 7
    assert "each device of a sampled run pays" in made.of(RunStatusChanged)[-1].text


Coins = np.ndarray[Any, np.dtype[np.float64]]  # a row for each round, a column for each device: 1 if it is sampled
POPULATION = [f"device-{number}" for number in range(40)]
DRAWS, CHANCE = 4000, 0.3


@pytest.fixture(scope="module")
def coins() -> Coins:
    rng, rows = SystemRng(), np.zeros((DRAWS, len(POPULATION)))
    for row in rows:
        sample = set(poisson_sample(POPULATION, CHANCE, rng))
        row[:] = [device in sample for device in POPULATION]
    return rows


def test_each_device_is_sampled_at_the_rate(coins: Coins) -> None:
    deviation = np.sqrt(CHANCE * (1 - CHANCE) / DRAWS)
    assert np.abs(coins.mean(axis=0) - CHANCE).max() < 5.5 * deviation


def test_the_size_of_a_sample_is_binomial(coins: Coins) -> None:
    """A sample of a fixed size has the variance 0; coins that depend on each other have a larger one."""
    sizes, variance = coins.sum(axis=1), len(POPULATION) * CHANCE * (1 - CHANCE)
    assert abs(sizes.var() / variance - 1) < 5.5 * np.sqrt(2 / DRAWS)


def test_coins_of_two_devices_and_of_two_rounds_are_independent(coins: Coins) -> None:
    centred = (coins - CHANCE) / np.sqrt(CHANCE * (1 - CHANCE))
    pairs = centred.T @ centred / DRAWS
    np.fill_diagonal(pairs, 0.0)
    next_round = (centred[1:] * centred[:-1]).mean(axis=0)
    assert np.abs(pairs).max() < 6 / np.sqrt(DRAWS)
    assert np.abs(next_round).max() < 6 / np.sqrt(DRAWS)


class Words:
    """A source of four coins that are known."""

    def random_bytes(self, count: int) -> bytes:
        return np.array([2**62 - 1, 2**62, 0, 2**64 - 1], np.uint64).tobytes()

    def fill(self, out: Any) -> None:
        raise NotImplementedError


def test_a_word_below_the_rate_samples_and_the_rate_itself_does_not() -> None:
    assert poisson_sample("abcd", 0.25, Words()) == ("a", "c")
    assert poisson_sample("abcd", 1.0, Words()) == ("a", "b", "c"), "all but one word of 2^64"


def test_the_ledger_of_a_device_books_the_cost_without_amplification() -> None:
    amplified = noise_plan(PLAN, 28, 1).release
    _, booked = spending(PLAN, 28)
    own = Release.from_json(booked)
    assert (own.rate, amplified.rate) == (1.0, RATE)
    assert epsilon_of({own: 3}, 1e-3) > 1.5 * epsilon_of({amplified: 3}, 1e-3)
