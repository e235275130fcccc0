"""The schedule of the server's learning rate: one curve for clients and server, the same after a kill."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.server_bench import LAYOUT, Bench, drive_through, killed, scripted
from thinwire.aggregation import codecs
from thinwire.aggregation.server_optimizers import lr_factor, server_rate, server_section_at
from thinwire.client.train.schedule import Schedule
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored
from thinwire.server.model_store import Versions

KINDS = st.sampled_from(["constant", "linear", "cosine"])


@given(kind=KINDS, warmup=st.floats(0, 0.9), end=st.floats(0, 1), made=st.integers(0, 40), rounds=st.integers(1, 30))
def test_server_and_clients_compute_the_same_factor(
    kind: str, warmup: float, end: float, made: int, rounds: int
) -> None:
    begin, until = made / rounds, (made + 1) / rounds
    middle = min(1.0, begin + (until - begin) * 0.5)
    assert lr_factor(kind, warmup, end, middle) == Schedule(kind, warmup, end, begin, until).factor(0, 1)


def plan(**server: object) -> RunPlan:
    return RunPlan.from_json({"run": {"task": "t", "rounds": 4}, "local": {"lr": 1}, "server": server})


def test_the_rate_of_each_step_follows_the_schedule() -> None:
    falls = plan(lr=2.0, schedule="linear", lr_end=0.5)
    assert [server_rate(falls, made) for made in range(4)] == [1.875, 1.625, 1.375, 1.125]
    rises = plan(lr_warmup=0.5)
    assert [server_section_at(rises, made).lr for made in range(4)] == [0.25, 0.75, 1.0, 1.0]
    constant = plan(lr=3.0)
    assert server_section_at(constant, 3) is constant.server


def test_a_schedule_that_does_nothing_or_hurts_is_refused() -> None:
    def refused(**server: object) -> list[str]:
        return [one.what for one in plan(**server).check(codecs)]

    assert refused(schedule="cosine", lr_warmup=0.1, lr_end=0.1) == []
    assert refused(schedule_rounds=3) == ["[server] schedule_rounds = 3 with a constant learning rate"]
    assert refused(lr_end=0.1) == ['[server] lr_end = 0.1 with schedule = "constant"']
    assert refused(schedule="linear", schedule_rounds=2) == [
        "[server] schedule_rounds = 2 with [run] rounds = 4 and lr_end = 0"
    ]


def bench(folder: Path, optimizer: str = "fedavg") -> Bench:
    return Bench(
        folder, [scripted("a"), scripted("b")], run={"rounds": 4}, uplink={"codec": "identity"},
        server={"optimizer": optimizer, "lr": 0.5, "schedule": "cosine", "lr_warmup": 0.3, "lr_end": 0.1},
    )  # fmt: skip


def models(one: Bench) -> list[np.ndarray]:
    versions = Versions(one.home.run(one.run_id), LAYOUT)
    return [versions.read(event)[0] for event in one.events(ModelStored)]


def test_the_server_steps_at_the_rate_of_the_schedule(tmp_path: Path) -> None:
    def steps(schedule: str) -> list[np.ndarray]:
        one = Bench(
            tmp_path / schedule, [scripted("a")], run={"rounds": 3, "keep": "all"}, uplink={"codec": "identity"},
            server={"schedule": schedule, **({"lr_end": 0.0} if schedule == "constant" else {"lr_end": 0.4})},
        )  # fmt: skip
        assert one.drive().status == "done"
        found = models(one)
        return [after - before for before, after in pairwise(found)]

    for made, (constant, linear) in enumerate(zip(steps("constant"), steps("linear"), strict=True)):
        assert linear == pytest.approx(constant * (1 - 0.6 * (made + 0.5) / 3), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("optimizer", ["fedavg", "fedadam"])
def test_a_kill_at_any_commit_gives_the_same_model(tmp_path: Path, optimizer: str) -> None:
    whole = bench(tmp_path / "whole", optimizer)
    places = drive_through(whole)
    expected = whole.store.run(whole.run_id).model_digest

    def check(one: Bench, where: str) -> None:
        assert one.store.run(one.run_id).model_digest == expected, where

    killed(lambda folder: bench(folder, optimizer), tmp_path, places, check, slice(0, None, 2))
