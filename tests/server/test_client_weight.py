"""How much one client may count: no more than it honestly can, and no more than `[cohort] max_weight` medians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_hostile_devices import Liar, Lie, liar
from tests.support.explained import whys
from tests.support.normed import NORMED, normed
from tests.support.server_bench import LAYOUT, Bench, drive_through, killed, outcome, scripted, work
from thinwire.cli.runs.progress import Teller
from thinwire.client.train.schedule import Normaliser, Schedule
from thinwire.core import RunPlan
from thinwire.core.errors import BadPayload, PlanError
from thinwire.core.events import ClientSelected, ModelStored, RoundClosed, UpdateDropped
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server.aggregator import caps_of, max_normaliser, require_normaliser
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, ScriptedDevice, SyntheticUpdates
from thinwire.store.round_timing import turns
from thinwire.web.run_queries import Reader

RAW = {"codec": "identity", "feedback": "none"}


def plan_of(**sections: Any) -> RunPlan:
    return RunPlan.from_json({"run": {"task": "toy"}, "local": {"lr": 1.0}, **sections})


def header(device: str = "a", examples: int = 10, steps: int = 5, a: float = 5.0) -> ReplyHeader:
    return ReplyHeader("x", UpdateId("toy-1", device, 1), 0, examples, steps, a)


@given(
    momentum=st.floats(0, 0.99), pull=st.floats(0, 1), lr=st.floats(1e-3, 10), steps=st.integers(1, 200),
    kind=st.sampled_from(["constant", "linear", "cosine"]), begin=st.floats(0, 0.9), warmup=st.floats(0, 0.9),
)  # fmt: skip
def test_no_honest_normaliser_is_refused(
    momentum: float, pull: float, lr: float, steps: int, kind: str, begin: float, warmup: float
) -> None:
    """`pull` is mu times lr: of more than 1 the proximal term alone makes the steps longer than its distance."""
    plan = plan_of(local={"lr": lr, "momentum": momentum, "prox": pull / lr, "steps": steps})
    schedule, counted = Schedule(kind, warmup, 0.1, begin, begin + 0.1), Normaliser(momentum, pull / lr, lr)
    for step in range(steps):
        counted.step(lr * schedule.factor(step, steps))
        if counted.a > 0:
            require_normaliser(plan, header(steps=step + 1, a=counted.a), steps)


def test_more_than_the_steps_can_come_to_is_refused() -> None:
    sgd, momentum = plan_of(local={"lr": 1.0, "steps": 5}), plan_of(local={"lr": 1.0, "steps": 5, "momentum": 0.9})
    require_normaliser(momentum, header(a=max_normaliser(momentum, 5)), 5)
    adam = plan_of(local={"lr": 1.0, "optimizer": "adam"})
    feddyn = plan_of(run={"task": "toy", "algorithm": "feddyn"}, cohort={"late": "drop"})
    for plan, sent, assigned in (
        (sgd, header(a=5.01), 5), (sgd, header(steps=6, a=6.0), 5), (sgd, header(a=1e9), 5), (sgd, header(steps=0,
            a=1.01), 5),
        (momentum, header(a=15.1), 5), (adam, header(a=5.1), 0), (adam, header(a=0.0), 0), (feddyn, header(a=5.0), 0),
    ):  # fmt: skip
        with pytest.raises(BadPayload, match="an update"):
            require_normaliser(plan, sent, assigned)


@pytest.mark.parametrize(
    ("given", "caps"),
    [
        ((10, 10, 1000), (100, np.inf)),
        ((10, 1000), (np.inf, np.inf)),
        ((10, 20, 30, 10**6), (250, np.inf)),
        ((1, 1, 1), (10, np.inf)),
    ],
)
def test_a_cap_is_ten_medians_from_three_clients_on(given: Sequence[int], caps: tuple[float, float]) -> None:
    headers = [header(str(nth), examples) for nth, examples in enumerate(given)]
    found = caps_of(plan_of(local={"lr": 1.0, "steps": 5}), headers)
    assert (found.examples, found.a) == caps
    assert caps_of(plan_of(cohort={"max_weight": "none"}), headers).examples == np.inf
    assert caps_of(plan_of(cohort={"max_weight": 3}), [*headers, header("x"), header("y")]).examples < np.inf


def test_two_updates_of_one_device_are_not_two_clients() -> None:
    headers = [header("a"), header("b", 10**6), replace(header("b", 10**6), update_id=UpdateId("toy-1", "b", 2))]
    assert caps_of(plan_of(), headers).examples == np.inf


@pytest.mark.parametrize("value", [0.5, 0, -1, "all", float("inf")])
def test_what_is_no_weight_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match="max_weight"):
        plan_of(cohort={"max_weight": value})


def bench(folder: Path, lie: Lie | None = None, devices: Sequence[ScriptedDevice] = (), **sections: Any) -> Bench:
    """A liar before four honest devices."""
    own = list(devices) or [liar("a", lie or (lambda assignment, sent: sent)), *(scripted(name) for name in "bcde")]
    sections["run"] = {"rounds": 2, **sections.get("run", {})}
    return Bench(folder, own, uplink=RAW, **sections)


def params(made: Bench) -> np.ndarray[Any, np.dtype[np.float32]]:
    return Versions(made.home.run(made.run_id), LAYOUT).read(made.events(ModelStored)[-1])[0]


@pytest.mark.parametrize("mode", ["sync", "buffered", "overlap"])
def test_a_normaliser_of_a_thousand_million_is_dropped_with_the_reason(tmp_path: Path, mode: str) -> None:
    local = {"lr": 1.0, "steps": 5, **({"overlap": {"max_delay": 1}} if mode == "overlap" else {})}
    cohort = {"mode": "buffered", "buffer": 4} if mode == "buffered" else {}
    made = bench(tmp_path, lambda assignment, sent: replace(sent, a=1e9), local=local, cohort=cohort)
    assert made.drive().status == "done"
    dropped = made.events(UpdateDropped)
    assert {e.device for e in dropped} == {"a"}
    assert {(e.reason, e.detail) for e in dropped} == {
        ("bad-payload", "an update with a = 1e+09 (5 steps come to at most 5)")
    }
    assert all(not any("/a/" in one for one in e.aggregated) for e in made.events(RoundClosed))


def test_steps_that_were_not_assigned_do_not_count_also_where_they_follow_the_devices_speed(tmp_path: Path) -> None:
    assigned = dict[str, int]()

    class Paced(Liar):
        def finish(self, delivery: Any, behavior: Behavior) -> Any:
            sent, body = super().finish(delivery, behavior)
            assert isinstance(sent, ReplyHeader)
            steps = delivery.assignment.work.steps
            assigned[delivery.assignment.assignment_id] = steps
            more = 1 if self.name == "a" else 0
            return replace(sent, steps=steps + more, a=float(steps + more)), body

    devices = [scripted(name, does=work(name, Paced)) for name in "abcd"]
    made = bench(tmp_path, devices=devices, local={"lr": 1.0, "steps": "auto"}, cohort={"deadline_s": 60})
    assert made.drive().status == "done"
    assert {e.steps for e in made.events(ClientSelected)} == {
        assigned[e.assignment_id] for e in made.events(ClientSelected)
    }
    assert {e.device for e in made.events(UpdateDropped)} == {"a"}
    for event in made.events(UpdateDropped):
        steps = assigned[event.assignment_id]
        assert event.detail == f"an update of {steps + 1} steps ({steps} were assigned)"


def test_one_client_counts_ten_medians_and_the_rounds_explanation_says_so(tmp_path: Path) -> None:
    made = bench(tmp_path / "capped", lambda assignment, sent: replace(sent, examples=10**9))
    assert made.drive().status == "done"
    for closed in made.events(RoundClosed):
        ((update_id, said),) = closed.capped.items()
        assert update_id.split("/")[1] == "a"
        assert said == {"examples": 10**9, "counted": 100, "median": 10.0}
    honest = bench(tmp_path / "honest", lambda assignment, sent: replace(sent, examples=100))
    honest.drive()
    assert params(made).tobytes() == params(honest).tobytes()
    assert honest.events(RoundClosed)[0].capped == {}
    (row,) = [one for one in made.store.updates(made.run_id, 1) if one.device == "a"]
    assert row.outcome == "aggregated"
    told = "weight capped: 100 of its 1000000000 examples count, 10 times the median of 10"
    assert (row.reason, row.weight_reason) == ("", told)
    run = made.store.run(made.run_id)
    rounds = made.store.rounds(made.run_id)
    one, _ = whys(run, rounds, made.store.updates(made.run_id), turns(rounds))
    assert one.sentence.endswith(f". a: {told}.")
    teller = Teller()
    lines = [line for _, event in made.store.events(made.run_id) for line in teller.hear(event)]
    assert sum(line.endswith(f"a: {told}") for line in lines) == 2, "each round's line, for who follows the run"
    page = Reader(made.store)
    assert page.round(made.run_id, 1).why.endswith(f"a: {told}.")
    assert [u.weight_reason for u in page.round(made.run_id, 1).updates if u.device == "a"] == [told]


def test_without_a_cap_it_owns_the_mean(tmp_path: Path) -> None:
    made = bench(tmp_path, lambda assignment, sent: replace(sent, examples=10**9), cohort={"max_weight": "none"})
    assert made.drive().status == "done"
    assert {len(e.capped) for e in made.events(RoundClosed)} == {0}


def test_where_the_plan_counts_passes_the_normaliser_is_capped_too(tmp_path: Path) -> None:
    lie: Lie = lambda assignment, sent: replace(sent, examples=10**9, steps=10**8, a=1e8)  # noqa: E731  # one line of a test
    made = bench(tmp_path / "capped", lie)
    assert made.drive().status == "done"
    (said,) = made.events(RoundClosed)[0].capped.values()
    assert (said["counted"], said["a_counted"], said["a_median"]) == (100, 50.0, 5.0)
    honest = bench(tmp_path / "honest", lambda assignment, sent: replace(sent, examples=100, steps=50, a=50.0))
    honest.drive()
    assert params(made).tobytes() == params(honest).tobytes()


@pytest.mark.parametrize("buffered", [False, True])
def test_a_kill_at_any_commit_caps_the_same_client(tmp_path: Path, buffered: bool) -> None:
    cohort = {"mode": "buffered", "buffer": 4, "max_weight": 2} if buffered else {"max_weight": 2}

    def begin(folder: Path) -> Bench:
        devices = [normed("a", 3.0, examples=10**9, steps=10), normed("b"), normed("c", 2.0), normed("d")]
        return Bench(folder, devices, layout=NORMED, run={"rounds": 1}, cohort=cohort, uplink=RAW)

    undisturbed = begin(tmp_path / "undisturbed")
    places = drive_through(undisturbed)
    (capped,) = [e.capped for e in undisturbed.events(RoundClosed)]
    assert set(capped) == {f"{undisturbed.run_id}/a/1"}
    assert ("counted" in capped[f"{undisturbed.run_id}/a/1"]) is not buffered, "examples weigh nothing in a buffer"

    def check(made: Bench, where: str) -> None:
        assert outcome(made) == outcome(undisturbed), where
        assert [e.capped for e in made.events(RoundClosed)] == [e.capped for e in undisturbed.events(RoundClosed)]

    killed(begin, tmp_path, places, check)


@pytest.mark.parametrize(("mode", "mean"), [("sync", 0.75), ("buffered", 0.5)])
def test_statistics_count_as_their_update_does(tmp_path: Path, mode: str, mean: float) -> None:
    cohort = {"mode": mode, **({"buffer": 2} if mode == "buffered" else {})}
    devices = [normed("a", mean=0.0, examples=10), normed("b", mean=1.0, examples=30)]
    made = Bench(tmp_path, devices, layout=NORMED, run={"rounds": 1}, cohort=cohort, uplink=RAW)
    assert made.drive().status == "done"
    buffers = Versions(made.home.run(made.run_id), NORMED).read(made.events(ModelStored)[-1])[1]
    assert buffers[:3] == pytest.approx([mean] * 3)


@pytest.mark.parametrize("algorithm", ["feddyn", "fedavg"])
def test_a_weight_that_is_kept_for_the_run_is_kept_as_it_was_capped(tmp_path: Path, algorithm: str) -> None:
    """Of FedDyn and of ef21 a device's first weight is its weight for good."""
    plan: dict[str, Any] = {"run": {"algorithm": algorithm, "rounds": 3}, "cohort": {"late": "drop"}}
    uplink = RAW if algorithm == "feddyn" else {"codec": "topk(0.2)", "feedback": "ef21"}
    devices = [
        scripted(name, does=SyntheticUpdates(name, LAYOUT, 1.0, 10**9 if name == "a" else 10)) for name in "abcd"
    ]
    made = Bench(tmp_path, devices, uplink=uplink, **plan)
    made.drive(stop=lambda: "service" if len(made.reasons()) >= 1 else None)
    made.restart()
    assert made.drive().status == "done"
    assert [[one["counted"] for one in e.capped.values()] for e in made.events(RoundClosed)] == [[100], [], []]
