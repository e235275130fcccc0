"""What is said of private runs: what their clients have spent, by the ledger of a store."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.store.test_privacy_ledger import release_it, reserve
from tests.support.store_story import LAYOUT, status
from thinwire.core.clock import HEARD
from thinwire.core.fleet import TaskReport
from thinwire.core.formatting import rounded_up
from thinwire.core.plan import RunPlan
from thinwire.privacy.accounting import Release, epsilon
from thinwire.reports.privacy import Spending, last_contacts, ledger, private_lines, spending_of_run, spent_text
from thinwire.reports.privacy_history import SpendingHistory
from thinwire.reports.privacy_report import privacy_report
from thinwire.store import PrivacyRow, Store

PLAN = """
[run]
task = "digits"
evaluate = "off"
[local]
lr = 0.5
steps = 5
[privacy]
mode = "central"
clip = 1.0
noise_multiplier = 1.0
delta = 1e-4
"""
FINE = Release("discrete-gaussian", 10.0, 225.0, 32)
COARSE = Release("discrete-gaussian", 10.0, 100.0, 32)


class Story:
    """Records runs whose rounds spend, without the rest of their events."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def run(self, plan: str = PLAN) -> str:
        report = TaskReport("digits", codecs=("int8",), layout_digest=LAYOUT.digest)
        return self.store.create_run("digits", RunPlan.parse(plan), LAYOUT, report)

    def spend(
        self, run_id: str, number: int, clients: str, release: Release = FINE, *, released: bool = True,
        population: str = "digits",
    ) -> None:  # fmt: skip
        reserve(self.store, run_id, number, population, release.to_json(), clients.split())
        if released:
            release_it(self.store, run_id, number)

    def spent(self, population: str | None = None) -> list[Spending]:
        return ledger(self.store.privacy.rows(population), {run.run_id: run for run in self.store.runs()})


@pytest.fixture
def story(store: Store) -> Story:
    return Story(store)


def test_contacts_stay_hidden_while_a_sampled_run_waits_for_its_turn_to_go_on(
    store: Store, story: Story, tmp_path: Path
) -> None:
    """A person has resumed or extended it: the contacts of its last round are still those of the sample."""
    lock = tmp_path / "lock"
    lock.with_name(HEARD).write_text(json.dumps({"a": 1000.0, "b": 1060.0}))
    run_id = story.run(PLAN.replace("[local]", "[cohort]\ndeadline_s = 60\n[local]") + "sampling_rate = 0.5\n")
    seen = list[int]()
    for one in ("queued", "running", "paused", "queued", "running", "done", "queued"):
        store.record(run_id, [status(one, time.time())])
        seen.append(len({*last_contacts(store.runs(), lock).values()}))
    assert seen == [2, 1, 1, 1, 1, 1, 1]


def test_a_run_costs_what_its_own_rounds_cost_and_its_clients_pay_for_all_runs_of_the_population(
    story: Story,
) -> None:
    first, second = story.run(), story.run(PLAN.replace("1e-4", "1e-6"))
    for number, clients in enumerate(("a b", "a c", "a b"), 1):
        story.spend(first, number, clients)
    story.spend(second, 1, "a c", COARSE)
    story.spend(second, 2, "b d", population="others")
    by_first, by_second, of_others = story.spent()
    assert (by_first.participations, by_second.participations, by_first.clients) == (3, 1, 3)
    assert by_first.epsilon_run == epsilon({FINE: 3}, 1e-4)
    assert by_first.epsilon == epsilon({FINE: 3, COARSE: 1}, 1e-4), "the client a, also for the other run"
    assert (by_second.epsilon_run, by_second.delta) == (epsilon({COARSE: 1}, 1e-6), 1e-6)
    assert by_second.epsilon == epsilon({FINE: 3, COARSE: 1}, 1e-6)
    assert of_others.epsilon == epsilon({FINE: 1}, 1e-6), "b's rounds in the population digits are not counted here"
    assert [one.population for one in story.spent("others")] == ["others"]
    assert (by_first.noise_to_sensitivity, by_first.sensitivity) == (1.5, 10.0)


def test_a_reservation_without_a_release_is_spent_and_said(store: Store, story: Story) -> None:
    run = story.run()
    story.spend(run, 1, "a")
    story.spend(run, 2, "a", released=False)
    (found,) = story.spent()
    assert (found.reserved, found.released, found.epsilon) == (2, 1, epsilon({FINE: 2}, 1e-4))
    assert found.unreleased.startswith(f"{run}: 1 of 2 reserved rounds has no released model")
    assert any("a reservation stays spent" in line for line in private_lines(store, store.run(run)))


def test_a_private_run_says_epsilon_delta_unit_and_that_the_aggregator_saw_the_updates(
    store: Store, story: Story
) -> None:
    run = story.run()
    before = " ".join(private_lines(store, store.run(run)))
    assert before.startswith("epsilon 0 so far: no round is reserved; delta = 0.0001")
    story.spend(run, 1, "a b")
    spent = spending_of_run(store, store.run(run))
    assert spent is not None
    said = " ".join(private_lines(store, store.run(run)))
    bound = rounded_up(epsilon({FINE: 1}, 1e-4))
    assert f"epsilon {bound} at delta = 0.0001 is spent by the client that took part most, in 1 of 1 round" in said
    assert "one client with all its data" in said
    assert "it saw every update in the clear, and no device can check the epsilon" in said
    assert "in all runs" not in spent_text(spent), "it has one run"
    assert "in all runs of the population digits: " in spent_text(spent, budget=5.0)
    assert "of [privacy] budget = 5" in spent_text(spent, budget=5.0)


def test_runs_that_hide_one_record_make_the_sum_of_a_population_one_of_a_record(store: Store, story: Story) -> None:
    steps = Release("discrete-gaussian", 10.0, 225.0, 32, rate=0.1, steps=5, unit="record")
    example = PLAN.replace("central", "example") + "records = 320\n"
    whole, of_records = story.run(), story.run(example)
    story.spend(whole, 1, "a b")
    story.spend(of_records, 1, "a b", steps)
    first, second = story.spent()
    assert (first.epsilon_run, second.epsilon_run) == (epsilon({FINE: 1}, 1e-4), epsilon({steps: 1}, 1e-4))
    assert first.epsilon == second.epsilon == epsilon({FINE: 1, steps: 1}, 1e-4)
    assert "for one record of one device, because runs of mode example are among them" in spent_text(first)
    assert "because" not in spent_text(second)
    said = " ".join(private_lines(store, store.run(of_records)))
    assert "Unit of privacy: one record of one device." in said
    assert "only a device knows which of its records are in a batch" in said
    bets = [privacy_report(store, store.run(run))["meaning"] for run in (of_records, whole)]
    assert "that the data of one record of a device were used" in bets[0]
    assert "that the data of one client were used" in bets[1]


def test_each_client_of_a_sampled_run_has_spent_each_round_at_the_rate(store: Store, story: Story) -> None:
    sampled = Release("discrete-gaussian", 10.0, 225.0, 32, rate=0.1)
    first, run = story.run(), story.run(f"{PLAN}sampling_rate = 0.1\n")
    story.spend(first, 1, "a b", COARSE)
    for number in (1, 2, 3):
        story.spend(run, number, "", sampled, released=number < 3)
    before, spent = story.spent()
    assert (spent.participations, spent.reserved, spent.released, spent.rate) == (3, 3, 2, 0.1)
    assert spent.epsilon_run == epsilon({sampled: 3}, 1e-4) < epsilon({FINE: 3}, 1e-4) / 3
    assert spent.epsilon == before.epsilon == epsilon({sampled: 3, COARSE: 1}, 1e-4), "of a and b, who paid for both"
    assert before.epsilon_run == epsilon({COARSE: 1}, 1e-4)
    for run_id, one in ((first, before), (run, spent)):
        history = SpendingHistory(store)
        state = history.follow(store.run(run_id))
        assert state is not None
        assert state.spending == one
    assert history.by_round[2] == (epsilon({sampled: 2}, 1e-4), epsilon({sampled: 2, COARSE: 1}, 1e-4))
    row = store.run(run)
    lines = list(private_lines(store, row))
    assert "is spent by each client of the population, in 3 rounds (2 released)" in lines[0]
    assert "Poisson sampling at rate 0.1" in lines[-1]
    assert "do not know who was sampled" in lines[-1]
    assert "No amplification" in list(private_lines(store, store.run(first)))[-1]


def test_a_run_without_privacy_has_nothing_to_say(store: Store, story: Story) -> None:
    run = store.run(story.run(PLAN.partition("[privacy]")[0]))
    assert (spending_of_run(store, run), list(private_lines(store, run)), story.spent()) == (None, [], [])


def test_a_release_without_noise_has_no_bound(store: Store, story: Story) -> None:
    story.spend(story.run(), 1, "a", Release("discrete-gaussian", 10.0, 0.0, 32))
    (found,) = story.spent()
    assert found.epsilon is None
    assert "epsilon without a bound at delta" in spent_text(found)


@pytest.mark.parametrize("value", [1e-9, 0.12301, 4.7911, 7.9996, 9.999, 100.01, 1234.5])
def test_an_epsilon_is_never_shown_below_its_value(value: float) -> None:
    assert value <= float(rounded_up(value)) <= value * 1.01


def test_a_settled_round_counts_for_every_client_and_an_unknown_release_has_no_bound() -> None:
    def row(number: int, state: str, release: str, devices: tuple[str, ...] = (), count: int = 1) -> PrivacyRow:
        run_id = "" if state == "settled" else "digits-1"
        return PrivacyRow(number, state, 1.0, "digits", run_id, number, release, count, "", "", devices)

    begun = row(1, "committed", FINE.to_json(), ("a",))
    (found,) = ledger([begun, row(2, "settled", COARSE.to_json(), count=3)], {})
    assert (found.epsilon_run, found.epsilon) == (epsilon({FINE: 1}, 1e-5), epsilon({FINE: 1, COARSE: 3}, 1e-5))
    (found,) = ledger([begun, row(2, "reserved", '{"of": "a newer version"}', ("a",))], {})
    assert (found.reserved, found.epsilon_run, found.distributions) == (2, None, ())
