"""A run over stock nodes: one that sends what is no update ends nothing, and each is selected as the round says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.server.test_hostile_devices import Liar
from tests.support.server_bench import LAYOUT, work
from thinwire.core.errors import PlanError
from thinwire.core.fleet import Delivery
from thinwire.core.plan import RunPlan
from thinwire.core.serialization import assignment_from_bytes, reply_to_bytes
from thinwire.core.types import Assignment, ReplyHeader
from thinwire.flower.stock_apps import Carried, StockRun, _possible
from thinwire.server.aggregator import Model
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, SyntheticUpdates


@pytest.mark.parametrize("lie", ["no header", "no frames", "negative", "cut", "foreign frames"])
def test_a_stock_node_that_lies_ends_no_run(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 0.1')
    run, versions = StockRun(cast(Any, None), plan, "toy-1", tmp_path), Versions(tmp_path, LAYOUT)
    stored = versions.write(0, np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32), {}, 0.0)
    run.model = Model(LAYOUT, *versions.read(stored), {})

    def said(_kind: str, assignments: Mapping[int, Carried]) -> dict[int, Carried]:
        header, whole = work("a").finish(Delivery(assignment_from_bytes(assignments[1].header), None), Behavior())
        assert isinstance(header, ReplyHeader)
        bad = {
            "no header": Carried(b"{}", whole), "no frames": Carried(reply_to_bytes(replace(header, parts=())), b""),
            "negative": Carried(reply_to_bytes(replace(header, examples=-1)), whole),
            "cut": Carried(reply_to_bytes(header), whole[:-9]),
            "foreign frames": Carried(reply_to_bytes(header), bytes(len(whole))),
        }  # fmt: skip
        return {2: bad[lie], 1: Carried(reply_to_bytes(header), whole)}

    monkeypatch.setattr(run, "_exchange", said)
    run._round(1, [1, 2], versions, stored)
    assert run.model.params.any()


@pytest.mark.parametrize("optimizer", ["fedavg", "fedavgm"])
def test_a_stock_nodes_numbers_that_no_model_can_hold_are_left_out(
    tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'[run]\ntask = "toy"\n[local]\nlr = 0.1\n[uplink]\ncodec = "identity"\n[server]\noptimizer = "{optimizer}"'
    run, versions = StockRun(cast(Any, None), RunPlan.parse(text), "toy-1", tmp_path), Versions(tmp_path, LAYOUT)
    stored = versions.write(0, np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32), {}, 0.0)
    run.model = Model(LAYOUT, *versions.read(stored), {})
    nodes = {1: SyntheticUpdates("a", LAYOUT, 3e38, examples=1), 2: SyntheticUpdates("b", LAYOUT, 1.0)}

    def said(_kind: str, assignments: Mapping[int, Carried]) -> dict[int, Carried]:
        found = {
            node: made.finish(Delivery(assignment_from_bytes(assignments[node].header), None), Behavior())
            for node, made in nodes.items()
        }
        return {node: Carried(reply_to_bytes(header), body) for node, (header, body) in found.items()}

    monkeypatch.setattr(run, "_exchange", said)
    for number in range(1, 4):
        stored = run._round(number, [1, 2], versions, stored)
    assert 0 < np.abs(run.model.params).max() < 100
    assert list(run._outcomes) == [2]


def test_a_stock_node_owns_no_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 0.1\nsteps = 1\n[uplink]\ncodec = "identity"')
    run, versions = StockRun(cast(Any, None), plan, "toy-1", tmp_path), Versions(tmp_path, LAYOUT)
    stored = versions.write(0, np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32), {}, 0.0)
    run.model = Model(LAYOUT, *versions.read(stored), {})

    def boasts(_assign: Assignment, header: ReplyHeader) -> ReplyHeader:
        return replace(header, steps=10**9, a=1e9)

    nodes = {number: SyntheticUpdates(name, LAYOUT, 1.0) for number, name in enumerate("abc")}
    nodes |= {3: SyntheticUpdates("many", LAYOUT, -1.0, examples=10**9), 4: Liar("large", LAYOUT, -1.0, lie=boasts)}

    def said(_kind: str, assignments: Mapping[int, Carried]) -> dict[int, Carried]:
        given = {node: Delivery(assignment_from_bytes(assigned.header), None) for node, assigned in assignments.items()}
        found = {node: nodes[node].finish(delivery, Behavior()) for node, delivery in given.items()}
        return {node: Carried(reply_to_bytes(header), body) for node, (header, body) in found.items()}

    monkeypatch.setattr(run, "_exchange", said)
    run._round(1, list(nodes), versions, stored)
    assert np.allclose(run.model.params, (30 - 100) / 130)
    assert list(run._outcomes) == [0, 1, 2, 3]
    told = capsys.readouterr().out
    assert "many: weight capped: 100 of its 1000000000 examples count, 10 times the median of 10" in told
    assert "node 4 sent an invalid update: an update of 1000000000 steps (1 were assigned)" in told


def test_stock_nodes_are_selected_in_the_warm_ups_codec_and_with_dgcs_clip_for_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[run]\ntask = "toy"\n[local]\nlr = 0.1\nsteps = 1\nclip_grad = 1.0\n[uplink]\ncodec = "dgc(0.01) > int8"'
    run = StockRun(cast(Any, None), RunPlan.parse(text), "toy-1", tmp_path)
    versions = Versions(tmp_path, LAYOUT)
    stored = versions.write(0, np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32), {}, 0.0)
    run.model = Model(LAYOUT, *versions.read(stored), {})
    assigned, devices = list[Assignment](), {node: work(f"d{node}") for node in range(4)}

    def said(_kind: str, assignments: Mapping[int, Carried]) -> dict[int, Carried]:
        found = {}
        for node, carried in assignments.items():
            assigned.append(assignment_from_bytes(carried.header))
            header, whole = devices[node].finish(Delivery(assigned[-1], None), Behavior())
            found[node] = Carried(reply_to_bytes(header), whole)
        return found

    monkeypatch.setattr(run, "_exchange", said)
    for number in range(1, 6):
        stored = run._round(number, list(devices), versions, stored)
    codecs = [assignment.codec for assignment in assigned[::4]]
    assert codecs == [f"topk({ratio}) > int8" for ratio in ("0.25", "0.0625", "0.015625", "0.01", "0.01")]
    assert {assignment.work.clip for assignment in assigned} == {2.0}


@pytest.mark.parametrize(
    "override",
    [
        ("downlink.codec", "int8"),
        ("run.algorithm", "scaffold"),
        ("run.target", "{ value = 0.9 }"),
        ("secure.enabled", "true"),
        ("privacy.mode", "local"),
    ],
)
def test_what_needs_to_know_what_each_node_holds_is_refused_over_stock_nodes(override: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match="over stock nodes"):
        _possible(RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 0.1', overrides=dict([override])))
