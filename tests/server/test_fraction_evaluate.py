"""`[run] fraction_evaluate`: a share of the selected clients evaluates, the same one whatever was killed."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.server_bench import Bench, drive_through, killed, scripted
from thinwire.core import RunPlan
from thinwire.core.events import ClientSelected, Evaluated
from thinwire.core.serialization import assignment_from_bytes, assignment_to_bytes
from thinwire.server.policy.cohort import evaluates, evaluators, evaluators_of

NAMES = [f"d{number}" for number in range(8)]
SETS = st.sets(st.sampled_from(NAMES))


def plan(share: float, seed: int = 0) -> RunPlan:
    return RunPlan.from_json({"run": {"task": "t", "fraction_evaluate": share, "seed": seed}, "local": {"lr": 1}})


@given(share=st.floats(0.01, 1), seed=st.integers(0, 99), number=st.integers(1, 99), names=SETS)
def test_the_share_evaluates_and_one_at_least(share: float, seed: int, number: int, names: set[str]) -> None:
    made = plan(share, seed)
    found = evaluators(made, number, names)
    assert len(found) == evaluators_of(made, len(names)) <= len(names)
    assert found <= names
    assert bool(found) == bool(names)
    assert found == evaluators(made, number, sorted(names, reverse=True)), "the order decides nothing"


def test_each_client_evaluates_as_often_as_the_share_says() -> None:
    made, rounds = plan(0.25), range(1, 401)
    times = {name: sum(name in evaluators(made, number, NAMES) for number in rounds) for name in NAMES}
    assert all(60 < count < 140 for count in times.values()), times
    assert 60 < sum(evaluates(made, number, "late") for number in rounds) < 140


def bench(folder: Path) -> Bench:
    return Bench(
        folder, [scripted(name) for name in NAMES[:4]], run={"rounds": 3, "fraction_evaluate": 0.5, "seed": 7}
    )  # fmt: skip


def chosen(one: Bench) -> list[tuple[int, str, bool]]:
    return sorted((event.round, event.device, event.evaluates) for event in one.events(ClientSelected))


def measured(one: Bench) -> list[tuple[int, int, float, bool]]:
    return [(event.version, event.clients, event.metrics["loss"], event.few) for event in one.events(Evaluated)]


def test_half_of_the_clients_evaluate_and_the_last_model_too(tmp_path: Path) -> None:
    one = bench(tmp_path)
    assert one.drive().status == "done"
    said = {(a.round, device): a.evaluates for device in NAMES[:4] for a in one.assignments(device)}
    assert said == {(number, device): value for number, device, value in chosen(one)}
    assert [sum(value for number, _, value in chosen(one) if number == n) for n in (1, 2, 3)] == [2, 2, 2]
    assert measured(one) == [(version, 2, float(version), False) for version in range(4)]
    assert sum(len(one.assignments(device, "evaluate")) for device in NAMES[:4]) == 2


def test_a_kill_at_any_commit_lets_the_same_clients_evaluate(tmp_path: Path) -> None:
    whole = bench(tmp_path / "whole")
    places = drive_through(whole)

    def check(one: Bench, where: str) -> None:
        assert (chosen(one), measured(one)) == (chosen(whole), measured(whole)), where

    assert killed(bench, tmp_path, places, check, slice(None, None, 2)) >= 3


def test_the_wire_names_only_the_clients_that_do_not_evaluate(tmp_path: Path) -> None:
    one = bench(tmp_path)
    one.drive()
    for assignment in one.assignments(NAMES[0]):
        raw = assignment_to_bytes(assignment)
        assert (b"evaluates" in raw) == (not assignment.evaluates)
        assert assignment_from_bytes(raw).evaluates == assignment.evaluates
