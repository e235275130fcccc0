"""Personal layers on a device: they move with a committed reply, once, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from torch import nn

from tests.support.killed_writes import killed_at_each_write
from tests.support.small_task import RUN, Aggregator, cross_entropy, normed, plan_of, task_of
from tests.support.trained_elsewhere import Elsewhere
from thinwire.client.execute import Begun, Trained
from thinwire.client.handler import AssignmentHandler
from thinwire.client.personal import RESHAPED
from thinwire.client.personal_files import FOLDER
from thinwire.client.run_store import delete_learned
from thinwire.client.train.errors import Cancelled
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.layout import Layout, Tensor
from thinwire.core.personal_layers import personal_tensors, shared_layout
from thinwire.core.types import Failure

FEDPER, FEDBN = '["3.*"]', '["1.*"]'


def device(folder: Path, globs: str = FEDPER, more: str = "", **options: Any) -> Aggregator:
    return Aggregator(folder, task_of(normed, **options), plan_of(f"personal_layers = {globs}\n{more}"))


def kept(handler: AssignmentHandler) -> tuple[int, dict[str, Any]]:
    """The sequence of the last reply and the personal values that this disk holds."""
    _, state = handler.runs.open(RUN, lambda line: None)
    return state.sequence, {name: array.tolist() for name, array in state.personal.items()}


def trained(aggregator: Aggregator, *rounds: int, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """What the device keeps after each of these rounds, each in a process of its own."""
    found = []
    for number in rounds:
        handler = aggregator.handler(**options)
        reply, _ = aggregator.answer(handler, aggregator.assign(number))
        assert not isinstance(reply, Failure), reply.text
        found.append(kept(aggregator.handler(**options)))
    return found


def test_an_update_has_no_personal_tensor_and_the_device_keeps_its_values_over_restarts(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    assert [t.name for t in aggregator.first.layout.trained] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    (_, first), (_, second) = trained(aggregator, 1, 2)
    assert set(first) == set(second) == {"3.weight", "3.bias"}
    assert first != second


def test_batch_normalization_is_kept_with_its_statistics_and_its_counter_is_not_sent(tmp_path: Path) -> None:
    aggregator = device(tmp_path, FEDBN)
    handler = aggregator.handler()
    reply, _ = aggregator.answer(handler, aggregator.assign(1))
    assert set(kept(handler)[1]) == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert reply.counters == {}
    assert [part.name for part in reply.parts] == ["frame/0"]
    assert handler.runs[RUN][1].counters == {"1.num_batches_tracked": 3}


def test_the_second_training_begins_where_the_first_one_ended(tmp_path: Path) -> None:
    """With a tiny rate nothing moves, so the values that come back are those that went."""
    aggregator = device(tmp_path)
    ((_, first),) = trained(aggregator, 1)
    raw = aggregator.plan.to_json()
    tiny = RunPlan.from_json({**raw, "local": {**raw["local"], "lr": 1e-30}})
    still = Aggregator(tmp_path, aggregator.task, tiny)
    ((_, second),) = trained(still, 2)
    assert second == first


def test_a_repeated_a_withdrawn_and_a_failed_assignment_move_nothing(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    (before,) = trained(aggregator, 1)
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign(1))
    assert kept(handler) == before, "it was answered before"
    with pytest.raises(Cancelled):
        handler.handle(aggregator.assign(2), lambda: True, aggregator.said.append)
    assert kept(aggregator.handler()) == before
    broken = device(tmp_path, loss=lambda model, batch: 1 / 0)
    reply, _ = broken.answer(broken.handler(), broken.assign(2))
    assert isinstance(reply, Failure)
    assert kept(aggregator.handler()) == before


@pytest.mark.parametrize("outcome", ["aggregated", "dropped", "unknown"])
def test_no_outcome_moves_them_back(tmp_path: Path, outcome: str) -> None:
    aggregator = device(tmp_path)
    (before,) = trained(aggregator, 1)
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign(2, kind="evaluate", outcomes=[(1, outcome)]))
    assert kept(handler)[1] == before[1]


def test_a_kill_at_any_write_leaves_the_values_of_one_of_two_commits_and_the_same_assignment_ends_alike(
    tmp_path: Path,
) -> None:
    died = killed_at_each_write(tmp_path, device, trained, kept, writes=12)
    assert died >= 3, "the parts, the values and the state are written one after the other"


@pytest.mark.parametrize("how", ["damaged", "older"])
def test_lost_and_older_values_begin_again_and_the_reply_says_so(tmp_path: Path, how: str) -> None:
    aggregator = device(tmp_path)
    (_, second) = trained(aggregator, 1, 2)
    handler = aggregator.handler()
    if how == "older":
        handler.continue_sequences({RUN: 3})  # the aggregator has seen a later update
    else:
        for path in (tmp_path / "device" / "runs" / RUN).glob("personal-*"):
            path.unlink()
    reply, _ = aggregator.answer(handler, aggregator.assign(3))
    assert (reply.lost, reply.metrics["eval/personal"]) == (how, (0.0, 6.0))
    fresh = device(tmp_path / "other")
    assert kept(handler)[1] == trained(fresh, 3)[0][1] != second[1]


def test_an_evaluation_says_whether_it_used_trained_values(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    used = [aggregator.answer(aggregator.handler(), aggregator.assign(n))[0].metrics["eval/personal"] for n in (1, 2)]
    assert used == [(0.0, 6.0), (6.0, 6.0)]


def test_they_outlive_their_run_and_are_deleted_with_what_the_device_learned(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    (before,) = trained(aggregator, 1)
    handler = aggregator.handler()
    handler.stop(aggregator.assign(2, kind="stop").assignment, aggregator.said.append)
    found = load_file(tmp_path / "device" / FOLDER / f"{RUN}.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == before[1]
    assert kept(aggregator.handler()) == (1, {})
    delete_learned(tmp_path / "device")
    assert not (tmp_path / "device" / FOLDER).exists()


def still(folder: Path, run: str = "", **options: Any) -> Aggregator:
    """Training that moves nothing: the values that come back are those with which it began."""
    plan = plan_of(f"personal_layers = {FEDPER}", run=run).to_json()
    slow = RunPlan.from_json({**plan, "local": {**plan["local"], "lr": 1e-30}})
    return Aggregator(folder, task_of(options.pop("model", normed), **options), slow)


def four_classes() -> nn.Module:
    return nn.Sequential(*list(normed().children())[:3], nn.Linear(5, 4))


def test_values_of_another_shape_begin_again_and_the_reply_says_so(tmp_path: Path) -> None:
    trained(device(tmp_path), 1)
    changed = still(tmp_path, model=four_classes)
    reply, _ = changed.answer(handler := changed.handler(), changed.assign(2))
    assert (reply.lost, len(kept(handler)[1]["3.bias"])) == (RESHAPED, 4)
    assert f"{RUN}: the personal layers of {RUN} have other tensors or shapes; they begin again" in changed.said
    reply, _ = changed.answer(handler, changed.assign(3))
    assert reply.lost == ""


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_that_begins_with_the_model_of_another_one_begins_with_its_values(tmp_path: Path, is_over: bool) -> None:
    first = device(tmp_path)
    (before,) = trained(first, 1)
    if is_over:
        first.handler().stop(first.assign(2, kind="stop").assignment, first.said.append)

    def begun(origin: str, run: str, **options: Any) -> tuple[Any, dict[str, Any]]:
        aggregator = still(tmp_path, f'init = "{origin}"', **options)
        reply, _ = aggregator.answer(handler := aggregator.handler(), aggregator.assign(1, run=run))
        return reply, {name: array.tolist() for name, array in handler.runs[run][1].personal.items()}

    reply, values = begun(f"run:{RUN}", "small-8")
    assert values == before[1]
    assert (reply.lost, reply.metrics["eval/personal"]) == ("", (6.0, 6.0))
    for number, origin in enumerate((f"run:{RUN}@0", "run:small-77", "run:../small-1"), 9):
        reply, values = begun(origin, f"small-{number}")
        assert values != before[1]
        assert (reply.lost, reply.metrics["eval/personal"]) == ("", (0.0, 6.0))
    reply, values = begun(f"run:{RUN}", "small-12", model=four_classes)
    assert (reply.lost, len(values["3.bias"])) == (RESHAPED, 4)


def values_in(file: Path) -> dict[str, Any]:
    return {name: array.tolist() for name, array in load_file(file).items()}


def test_a_run_that_goes_on_after_its_end_goes_on_with_its_values(tmp_path: Path) -> None:
    """An extended run, or one that newer runs had displaced: before, its clients began again with those of model()."""
    aggregator = device(tmp_path)
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign(1, identity="first"))
    before = kept(handler)[1]
    handler.stop(aggregator.assign(2, kind="stop", identity="first").assignment, aggregator.said.append)
    assert kept(handler)[1] == {}
    reply, _ = aggregator.answer(aggregator.handler(), aggregator.assign(3, kind="evaluate", identity="first"))
    assert reply.metrics["eval/personal"] == (6.0, 6.0)
    aggregator.answer(handler := aggregator.handler(), aggregator.assign(4, identity="first"))
    assert kept(handler)[1] not in ({}, before)
    handler.stop(aggregator.assign(5, kind="stop", identity="first").assignment, aggregator.said.append)
    assert [path.name for path in (tmp_path / "device" / FOLDER).iterdir()] == [f"{RUN}.safetensors"]


@pytest.mark.parametrize("is_told", [True, False], ids=["after-its-end", "without-its-end"])
def test_another_run_of_the_same_id_neither_takes_nor_replaces_them(tmp_path: Path, is_told: bool) -> None:
    """An aggregator that was installed again numbers its runs from one; its predecessor may never have said the end."""
    aggregator = device(tmp_path)
    aggregator.answer(handler := aggregator.handler(), aggregator.assign(1, identity="first"))
    before = kept(handler)[1]
    if is_told:
        handler.stop(aggregator.assign(2, kind="stop", identity="first").assignment, aggregator.said.append)
    reply, _ = aggregator.answer(handler := aggregator.handler(), aggregator.assign(2, identity="second"))
    assert reply.metrics["eval/personal"] == (0.0, 6.0), "it begins with those of model()"
    after = kept(handler)[1]
    handler.stop(aggregator.assign(3, kind="stop", identity="second").assignment, aggregator.said.append)
    folder = tmp_path / "device" / FOLDER
    assert values_in(folder / f"{RUN}.safetensors") == before
    assert values_in(folder / f"{RUN}.1.safetensors") == after != before


def test_a_training_that_leaves_no_number_in_a_personal_layer_fails_and_moves_nothing(tmp_path: Path) -> None:
    """The loss is finite, and so are the shared tensors; a committed infinity would stay on the device for good."""
    aggregator = device(tmp_path, FEDBN)
    (before,) = trained(aggregator, 1)

    def loss(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        return cross_entropy(model, (inputs * 1e25, targets))

    broken = device(tmp_path, FEDBN, loss=loss)
    reply, _ = broken.answer(broken.handler(), broken.assign(2))
    assert isinstance(reply, Failure) and reply.kind == "non-finite"
    assert kept(aggregator.handler()) == before


def test_globs_that_match_nothing_half_of_a_tied_weight_or_everything_are_refused() -> None:
    layout = Layout.build(
        [Tensor("body", (2,)), Tensor("embed", (3,)), Tensor("ice", (4,), role="frozen")], [("head", "embed")]
    )
    for globs, said in (
        (("body", "neck*"), "neck.*matches no tensor"), (("ice",), "matches no tensor"),
        (("head",), "takes head and leaves embed"), (("*",), "every trained tensor"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=said):
            personal_tensors(layout, globs)
    shared = shared_layout(layout, ("head", "embed"))
    assert [t.name for t in shared.tensors] == ["body", "ice"]
    assert shared.aliases == ()
    assert shared.digest != layout.digest


def test_a_worker_process_gives_the_values_of_this_process(tmp_path: Path, one_thread: None) -> None:
    plan = plan_of('personal_layers = ["4.*", "1.*"]')
    other = Elsewhere(tmp_path, plan, threads=1)
    other.worker.describe()
    try:
        there, here = other.handler(), other.aggregator.handler(tmp_path / "here")
        for number in (1, 2):
            for handler in (there, here):
                reply, _ = other.aggregator.answer(handler, other.aggregator.assign(number))
                assert not isinstance(reply, Failure), reply.text
        assert kept(there) == kept(here)
        assert set(kept(there)[1]) > {"4.weight", "1.running_mean"}
    finally:
        other.worker.close()


def test_with_overlap_they_follow_the_order_of_training(tmp_path: Path) -> None:
    aggregator = device(tmp_path, more="overlap = { max_delay = 1 }")
    handler = aggregator.handler()
    first, second = (handler.begin(aggregator.assign(n), lambda: False, aggregator.said.append) for n in (1, 2))
    assert kept(handler) == (0, {}), "nothing is committed before it is sent"
    values = []
    for one in (first, second):
        assert isinstance(one, Begun)
        assert isinstance(one.outcome, Trained)
        values.append({name: array.tolist() for name, array in one.outcome.next_state.personal.items()})
    assert values[0] != values[1]
    for one, value in zip((first, second), values, strict=True):
        assert isinstance(one, Begun)
        handler.finish(one)
        assert kept(handler)[1] == value


def test_an_update_that_fails_to_encode_moves_nothing_forward_with_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the training that began before the failure was known nor the ones after it move anything of it."""
    aggregator = device(tmp_path, more="overlap = { max_delay = 2 }")
    handler, starts = aggregator.handler(), list[Any]()
    do = handler.executor.do

    def watched(order: Any, *rest: Any) -> Any:
        if order.train:
            starts.append(order.kept)
        return do(order, *rest)

    monkeypatch.setattr(handler.executor, "do", watched)

    def begin(number: int) -> Begun:
        begun = handler.begin(aggregator.assign(number), lambda: False, aggregator.said.append)
        assert isinstance(begun, Begun)
        return begun

    handler.finish(begin(1))
    committed = kept(handler)[1]
    failing, behind = begin(2), begin(3)
    with monkeypatch.context() as patch:
        patch.setattr("thinwire.client.execute.encode", lambda *given: 1 / 0)
        assert isinstance(handler.finish(failing)[0], Failure)
    after = begin(4)
    assert [start is None for start in starts] == [True, False, False, False]
    assert starts[3].tolist() == starts[1].tolist() != starts[2].tolist()
    assert not isinstance(handler.finish(behind)[0], Failure)
    assert kept(handler)[1] == committed
    assert not isinstance(handler.finish(after)[0], Failure)
    assert kept(handler)[1] != committed
