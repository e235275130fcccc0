"""A thousand clients in one process: loaded when they are selected, evicted to disk, and loaded again as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.support.small_task import linear, plan_of, task_of
from thinwire.client import ClientInfo
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import client_pool, simulate
from thinwire.simulation.run import run_sim
from thinwire.store import Store


def test_a_client_that_is_evicted_and_loaded_again_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of('[downlink]\ncodec = "topk(0.3)"', "topk(0.2) > int8", "classic", run="rounds = 4")
    in_memory = simulate(task_of(), plan, clients=3)
    monkeypatch.setattr(client_pool, "MAX_STATE_BYTES", 1)
    evicted = simulate(task_of(), plan, clients=3)
    assert in_memory.run.model_digest == evicted.run.model_digest
    assert [row.payload_up for row in in_memory.rounds] == [row.payload_up for row in evicted.rounds]


def test_only_who_is_selected_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, load = list[int](), client_pool.HandlerCache._load

    def counted(self: client_pool.HandlerCache, index: int, secure: bool) -> object:
        loaded.append(index)
        return load(self, index, secure)

    monkeypatch.setattr(client_pool.HandlerCache, "_load", counted)
    plan = plan_of("[cohort]\nclients = 3", run='rounds = 2\nevaluate = "off"')
    built = list[nn.Module]()

    def model() -> nn.Module:
        built.append(linear())
        return built[-1]

    history = simulate(task_of(model), plan, clients=1000)
    assigned = {device for row in history.rounds for device in row.selected}
    assert len(loaded) == len(assigned) <= 6
    assert len(built) < 10, "a model for each client would be a thousand"


def test_a_watched_simulation_shows_a_round_as_soon_as_it_closes(tmp_path: Path) -> None:
    home = AggregatorHome.under(tmp_path)
    seen = []
    with Store.open(home.database) as store, Store.open(home.database, read_only=True) as reader:
        begun: list[str] = []

        def on_event(event: object) -> None:
            if type(event).__name__ == "RoundClosed":
                seen.append(len(reader.rounds(begun[0])))

        run_sim(
            plan_of(run="rounds = 2"), task_of(), store=store, home=home, clients=2, client=ClientInfo(),
            on_event=on_event, on_begin=begun.append,
        )  # fmt: skip
    assert seen == [1, 2]
