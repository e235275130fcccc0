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
from thinwire.core.errors import PlanError, UsageError
from thinwire.core.fleet import Delivery
from thinwire.core.plan import RunPlan
from thinwire.core.serialization import assignment_from_bytes, reply_to_bytes
from thinwire.core.types import Assignment, ReplyHeader
from thinwire.flower.stock_apps import Carried, StockRun
from thinwire.flower.stock_plan import UNSUPPORTED, model_file, require_possible
from thinwire.server.aggregator import Model
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, SyntheticUpdates

EXAMPLE = Path(__file__).parents[2] / "examples" / "stock_flower" / "digits_app" / "plan.toml"


def decided(run: StockRun) -> dict[int, str]:
    """What each node is told about its last update."""
    return {node: outcome.outcome for node, (outcome,) in run._outcomes.items()}


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
    said_of_it = {} if lie in ("no header", "negative") else {2: "dropped"}
    assert decided(run) == {1: "aggregated", **said_of_it}, "where a header could be read"


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
    assert decided(run) == {1: "dropped", 2: "aggregated"}


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
    assert decided(run) == {**dict.fromkeys(range(4), "aggregated"), 4: "dropped"}
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


BASE = '[run]\ntask = "toy"\n[local]\nlr = 0.1'
OTHER = {
    ("run", "priority"): "2", ("run", "init"): '"device"', ("run", "keep"): '"all"',
    ("run", "target"): "{ value = 0.9 }", ("run", "patience"): "2", ("run", "fraction_evaluate"): "0.5",
    ("run", "task_match"): '"digest"',
    ("cohort", "wait_for"): "3", ("cohort", "wait_s"): "9", ("cohort", "min_updates"): "2",
    ("cohort", "retry_limit"): "1", ("cohort", "clients"): "3", ("cohort", "over_select"): "0.5",
    ("cohort", "deadline_s"): "9", ("cohort", "mode"): '"buffered"', ("cohort", "buffer"): "3",
    ("cohort", "max_concurrency"): "2", ("cohort", "selection"): '"speed"', ("cohort", "requires"): "{ cores = 2 }",
    ("cohort", "staleness_exponent"): "1", ("cohort", "max_staleness"): "2",
    ("uplink", "ladder"): '["fp16", "int8"]', ("server", "reduce"): '"median"', ("server", "max_norm"): "2.0",
    ("local", "personal_layers"): '["head.*"]',
}  # fmt: skip


@pytest.mark.parametrize(
    "override",
    [
        ("downlink.codec", "int8"),
        ("run.algorithm", "scaffold"),
        ("run.evaluate", "holdout"),
        ("local.steps", '"auto"'),
        ("uplink.feedback", "ef21"),
        ("secure.enabled", "true"),
        ("privacy.mode", "local"),
        *((".".join(place), OTHER[place]) for place in UNSUPPORTED),
    ],
)
def test_what_needs_to_know_what_each_node_holds_is_refused_over_stock_nodes(override: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match="over stock nodes") as refused:
        require_possible(RunPlan.parse(BASE, overrides=dict([override])))
    section, key = override[0].split(".")
    assert f"[{section}] {key}" in str(refused.value)
    assert refused.value.hint.endswith("or our own client: thinwire run")


def test_a_plan_that_contradicts_itself_is_refused_over_stock_nodes() -> None:
    with pytest.raises(PlanError, match="alpha"):
        require_possible(RunPlan.parse(BASE, overrides={"run.alpha": "0.2"}))


def test_the_plan_of_the_example_is_possible_and_so_is_one_that_drops_late_updates() -> None:
    for plan in (RunPlan.load(EXAMPLE), RunPlan.parse(BASE, overrides={"cohort.late": "drop"})):
        assert require_possible(plan) is plan


def test_a_file_for_the_model_in_no_folder_is_refused(tmp_path: Path) -> None:
    assert model_file("") is None
    assert model_file(str(tmp_path / "model.safetensors")) == tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match="there is no folder") as refused:
        model_file(str(tmp_path / "none" / "model.safetensors"))
    assert "absolute path" in refused.value.hint
