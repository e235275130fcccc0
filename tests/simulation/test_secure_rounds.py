"""Simulated runs with secure aggregation: the clients' own code, their masks, and the sum that comes out."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.support.scripted_rng import ScriptedRng
from tests.support.small_task import examples, task_of
from thinwire.client import secure
from thinwire.client.train.protocol import ClientInfo, Split
from thinwire.core import RunPlan
from thinwire.core.errors import UsageError
from thinwire.privacy.summed_metrics import UNIT
from thinwire.simulation import History, client_pool, simulate

PLAN = """
[run]
task = "small"
rounds = 4
metric = "loss"
[cohort]
clients = 5
deadline_s = 100
late = "drop"
min_updates = 3
[local]
lr = 0.1
batch = 8
steps = 3
buffers = "local"
"""
CLIENTS = 5
SECURE = """
[secure]
enabled = true
bits = 14
clip = 2.0
metrics = { loss = 10.0 }
"""


def run(more: str = "", text: str = PLAN, **named: Any) -> History:
    made = simulate(task_of(**named), RunPlan.parse(text + more), clients=CLIENTS)
    assert made.failures == ()
    return made


@pytest.fixture(scope="module")
def hidden() -> History:
    return run(SECURE)


def test_a_secure_run_learns_what_the_same_run_in_the_clear_learns(hidden: History) -> None:
    clear = run('[uplink]\ncodec = "identity"\n')
    assert [row.reason for row in hidden.rounds] == ["all"] * 4
    found, wanted = hidden.series("loss")[:3], clear.series("loss")[:3]
    most = CLIENTS * 10.0 / UNIT / (CLIENTS * 6)  # of the mean of 6 examples each, in units of the bound
    # Roundings are drawn: 65 runs were 0.0044 apart at most. From one version to the next it is 0.1.
    assert found == pytest.approx(wanted, abs=8e-3 + most), "means of the same models, up to the grid's rounding"


def test_the_last_version_is_evaluated_by_no_client(hidden: History) -> None:
    assert hidden.series("loss")[3] is None


def test_no_fact_of_a_single_client_is_stored(hidden: History) -> None:
    assert hidden.run.clipped == {}
    assert [(row.spread, row.train_metrics) for row in hidden.rounds] == [({}, {})] * 4


def test_the_same_secrets_give_the_same_bits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def bits(seed: int) -> str:
        numbers = count(1000 * seed)
        monkeypatch.setattr(secure, "SystemRng", lambda: ScriptedRng(next(numbers)))
        return run(SECURE, PLAN.replace("rounds = 4", "rounds = 2")).run.model_digest

    assert bits(1) == bits(1)
    assert bits(1) != bits(2), "rounding and rotation follow from the secrets"


def test_the_automatic_clip_follows_the_share_of_updates_that_fit() -> None:
    made = run(SECURE.replace("clip = 2.0\n", ""))
    clips = [row.secure_sum["clip"] for row in made.rounds]
    assert clips[0] == 1.0
    assert [row.secure_sum["next_clip"] for row in made.rounds][:3] == clips[1:]
    assert clips[1] == pytest.approx(clips[0] * 2 ** (-1 / 9)), "all updates of this task fit"


def test_a_client_that_cannot_train_drops_out_and_says_no_more_than_that() -> None:
    def data(client: ClientInfo) -> Split:
        if client.partition == 2:
            raise RuntimeError("the record of patient 7 is damaged")
        return Split(examples(), examples(6, 4))

    plan = RunPlan.parse(PLAN + SECURE + "max_dropout = 0.3\n")
    made = simulate(task_of(data=data), plan, clients=CLIENTS)
    assert [(row.reason, row.secure_sum["survivors"]) for row in made.rounds] == [("enough", 4)] * 4
    assert set(made.failures) == {f"round {number}: sim-2 failed: work" for number in (1, 2, 3, 4)}


def test_part_of_the_coordinates_travels_in_each_round() -> None:
    made, whole = run(SECURE + "support = 0.5\nrotate = false\n"), run(SECURE + "rotate = false\n")
    assert made.run.payload_up < whole.run.payload_up
    assert made.rounds[-1].reason == "all"


def test_a_secure_simulation_runs_in_one_process() -> None:
    with pytest.raises(UsageError, match="secure rounds in 2 processes"):
        simulate("digits=examples/digits/task.py", RunPlan.parse(PLAN.replace("small", "digits") + SECURE),
                 clients=5, processes=2)  # fmt: skip


def test_clients_that_are_evicted_between_rounds_stay_in_memory_in_the_middle_of_one(
    hidden: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secrets of a round are never on disk, so a client that is evicted in one could not go on with it."""
    monkeypatch.setattr(client_pool, "MAX_STATE_BYTES", 1)
    evicted = run(SECURE)
    assert [row.reason for row in evicted.rounds] == ["all"] * 4
    assert evicted.series("loss")[:3] == pytest.approx(hidden.series("loss")[:3], rel=0.02)


def test_the_metric_of_the_only_client_with_test_data_is_not_recorded() -> None:
    """Its sum would be that client's own value."""

    def data(client: ClientInfo) -> Split:
        whole = examples()
        return Split(whole, whole if client.partition == 2 else None)

    lonely = run(SECURE, data=data)
    assert [row.reason for row in lonely.rounds] == ["all"] * 4
    assert all(not row.metrics for row in lonely.rounds)
