"""`[run] evaluate = "holdout"`: results become events, early stopping waits for them, and a run goes on without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Fate, Killed, around_commits
from tests.support.server_bench import Bench, killing, scripted
from tests.support.several_runs import Site, steady
from thinwire.core.events import Evaluated, Event, ModelStored, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.server import command_queue
from thinwire.server.command_queue import CommandQueue
from thinwire.server.holdout import EVALUATED, CommandedHoldout, HoldoutResult


class Evaluator:
    """Evaluates with a loss that is known beforehand; `losses` says which versions it knows, and `until` when."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses, self.down, self.settled = losses, False, list[int]()

    def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
        if self.down:
            return []
        return [HoldoutResult(version, {"loss": (4 * self.losses[version], 4)}) for version in due]

    def settle(self, run_id: str, versions: Sequence[int]) -> None:
        self.settled += versions


def bench(folder: Path, rounds: int = 5, **run: Any) -> Bench:
    return Bench(
        folder, [scripted("a"), scripted("b")], run={"rounds": rounds, "evaluate": "holdout", **run},
        uplink={"codec": "identity"},
    )  # fmt: skip


def measured(one: Bench) -> list[tuple[int, float, bool]]:
    return [(event.version, event.metrics["loss"], event.best) for event in one.events(Evaluated)]


def test_each_version_is_evaluated_and_what_clients_claim_is_ignored(tmp_path: Path) -> None:
    one, evaluator = bench(tmp_path, rounds=3), Evaluator([9, 3, 5, 2])
    assert one.drive(holdout=evaluator).status == "done"
    assert measured(one) == [(0, 9, True), (1, 3, True), (2, 5, False), (3, 2, True)]
    assert [(event.clients, event.spread, event.examples) for event in one.events(Evaluated)] == [(0, {}, 4)] * 4
    assert evaluator.settled == [0, 1, 2, 3]
    run = one.store.run(one.run_id)
    assert (run.metrics0, run.metrics, run.best_version) == ({"loss": 9}, {"loss": 2}, 3)
    assert [row.metrics for row in one.store.rounds(one.run_id)] == [{"loss": 3}, {"loss": 5}, {"loss": 2}]


def test_versions_between_two_evaluations_are_left_out_but_not_the_last(tmp_path: Path) -> None:
    one = bench(tmp_path, rounds=5, evaluate_every=3)
    one.drive(holdout=Evaluator([9, 8, 7, 6, 5, 4]))
    assert [version for version, _, _ in measured(one)] == [0, 3, 5]


def test_patience_and_target_stop_the_run_by_the_holdout_data(tmp_path: Path) -> None:
    one = bench(tmp_path / "patience", patience=2)
    one.drive(holdout=Evaluator([9, 3, 4, 4, 1, 1]))
    assert one.store.run(one.run_id).version == 3
    other = bench(tmp_path / "target", target={"metric": "loss", "value": 3.5})
    other.drive(holdout=Evaluator([9, 6, 3, 2, 2, 2]))
    found = other.store.run(other.run_id)
    assert (found.version, "loss reached 3.5" in found.status_text) == (2, True)


def test_without_an_evaluator_the_run_goes_on_after_one_wait_and_metrics_come_later(tmp_path: Path) -> None:
    one, evaluator = bench(tmp_path, patience=2, evaluate_wait_s=30), Evaluator([9, 8, 7, 6, 5, 4])
    evaluator.down = True

    def back(event: Event) -> None:
        if isinstance(event, RoundOpened) and event.round == 4:
            evaluator.down = False

    assert one.drive(holdout=evaluator, on_event=back).status == "done"
    opened = [event.elapsed_s for event in one.events(RoundOpened)]
    assert opened[0] >= 30, "the first round waits for the first model's evaluation"
    assert opened[2] - opened[0] < 30, "the next ones do not: nobody came"
    assert [version for version, _, _ in measured(one)] == [0, 1, 2, 3, 4, 5]
    waits = [event.text for event in one.events(RunStatusChanged) if "waiting for the evaluation" in event.text]
    assert waits and "thinwire aggregator evaluate" in waits[0]


def test_a_run_without_early_stopping_waits_at_its_end_only(tmp_path: Path) -> None:
    one, evaluator = bench(tmp_path, evaluate_wait_s=45), Evaluator([1] * 6)
    evaluator.down = True
    assert one.drive(holdout=evaluator).status == "done"
    assert one.events(RoundOpened)[-1].elapsed_s < 45
    assert one.clock.now() >= 45
    assert measured(one) == []
    none = bench(tmp_path / "none", evaluate_wait_s=0)
    none.drive(holdout=evaluator)
    assert none.clock.now() < 45


def test_a_late_result_of_an_older_version_is_not_due(tmp_path: Path) -> None:
    class Skips(Evaluator):
        def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
            return [found for found in super().results(run_id, due) if found.version in (0, 3)]

    one = bench(tmp_path, rounds=4, evaluate_wait_s=1)
    one.drive(holdout=Skips([9, 8, 7, 6, 5]))
    assert [version for version, _, _ in measured(one)] == [0, 3]


@pytest.mark.parametrize("run", [{"patience": 2}, {"target": {"metric": "loss", "value": 4.0}}], ids=str)
def test_a_kill_at_any_commit_decides_the_same(tmp_path: Path, run: dict[str, Any]) -> None:
    losses = [9, 5, 6, 7, 3, 2]

    def outcome(one: Bench) -> object:
        closed = [(event.round, event.version) for event in one.events(RoundClosed)]
        return measured(one), closed, one.store.run(one.run_id).model_digest

    def drive(one: Bench, fate: Fate) -> None:
        around_commits(fate, one.store)
        try:
            one.drive(holdout=Evaluator(losses))
        except Killed:
            one.restart()
            one.drive(holdout=Evaluator(losses))

    whole, fate = bench(tmp_path / "whole", **run), Fate()
    drive(whole, fate)
    for at in range(2, len(fate.places), 6):
        one = bench(tmp_path / str(at), **run)
        drive(one, Fate(at))
        assert outcome(one) == outcome(whole), f"killed at {fate.places[at - 1]}"
        one.store.close()


def commanded(one: Bench) -> CommandedHoldout:
    return CommandedHoldout(CommandQueue(one.store.commands))


def test_the_service_takes_results_from_commands_and_answers_each(tmp_path: Path) -> None:
    one = bench(tmp_path, rounds=2, evaluate_wait_s=1)
    add = partial(one.store.commands.add, EVALUATED, one.run_id)
    first = add(HoldoutResult(0, {"loss": (9.0, 3.0)}, {"sick": [[3, 1], [1, 3]]}).to_json())
    wrong = add({"version": 0, "metrics": {"loss": "much"}})
    one.drive(holdout=commanded(one))
    assert one.events(Evaluated)[0].metrics == {"loss": 3.0, "sick_auc": 0.75, "sick_f1": 0.75}
    answers = [one.store.commands.result(number) for number in (first, wrong)]
    assert answers[0] == {"done": True, "version": 0}
    assert answers[1] is not None and "cannot read" in str(answers[1])


def test_a_crash_between_the_event_and_its_answer_records_no_result_twice(tmp_path: Path) -> None:
    one = bench(tmp_path, rounds=1, evaluate_wait_s=1)
    number = one.store.commands.add(EVALUATED, one.run_id, HoldoutResult(0, {"loss": (1.0, 1.0)}).to_json())
    with pytest.raises(Killed):
        one.drive(holdout=commanded(one), on_event=killing(lambda event: isinstance(event, Evaluated)))
    one.restart()
    one.drive(holdout=commanded(one))
    assert [event.version for event in one.events(Evaluated)] == [0]
    assert one.store.commands.result(number) == {"done": True, "version": 0, "ignored": True}


def test_the_models_that_wait_for_their_evaluation_are_kept(tmp_path: Path) -> None:
    one, evaluator = bench(tmp_path, rounds=4, evaluate_wait_s=0), Evaluator([5] * 5)
    evaluator.down, seen = True, list[set[str]]()

    def look(event: Event) -> None:
        if isinstance(event, RoundOpened):
            seen.append({path.name for path in one.home.run(one.run_id).glob("*.model")})

    one.drive(holdout=evaluator, on_event=look)
    assert seen[-1] == {f"v{version:06}.model" for version in range(4)}


def test_the_service_records_what_an_operator_leaves_and_answers_what_comes_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.5}))
    run_id = site.submit(run={"rounds": 5, "evaluate": "holdout", "patience": 2, "evaluate_wait_s": 20})
    losses = [9.0, 4.0, 5.0, 6.0, 1.0, 1.0]

    def leave(version: int) -> int:
        result = HoldoutResult(version, {"loss": (losses[version], 1.0)})
        return site.store.commands.add(EVALUATED, run_id, result.to_json())

    def on_event(_: str, event: Event) -> None:
        if isinstance(event, ModelStored) and event.version:
            leave(event.version)

    site.on_event = on_event
    leave(0)
    site.serve()
    assert site.store.run(run_id).version == 3, "two versions after the best one"
    assert [(e.version, e.best) for e in site.events(run_id, Evaluated)] == [
        (0, True), (1, True), (2, False), (3, False),
    ]  # fmt: skip
    late = leave(4)
    site.serve(seconds=5.0)
    assert site.store.commands.result(late) == {"done": True}
    assert site.store.commands.pending() == []
    assert len(site.events(run_id, Evaluated)) == 4
    assert not any(row.what == EVALUATED for row in site.store.audit.rows()[1])
