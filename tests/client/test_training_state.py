"""The state of a task's own train() on a client: it moves with a committed reply, once, and with nothing else."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.support.killed_writes import killed_at_each_write
from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.execute import Begun, Trained
from thinwire.client.handler import AssignmentHandler
from thinwire.client.personal_files import kept_runs
from thinwire.client.policy import Policy
from thinwire.client.train.errors import BadTask, Cancelled
from thinwire.client.train.framed_socket import BadFrame, FramedSocket
from thinwire.client.train.state import DTYPES, allocated, are_equal, copied
from thinwire.core.types import Failure


def counting(model: nn.Module, data: Any, context: Any) -> int:
    """Keep how many trainings there were, and the round of the last one."""
    context.should_stop()
    context.state["times"] = context.state.get("times", 0) + 1
    context.state["rounds"] = np.append(context.state.get("rounds", np.zeros(0, np.int32)), np.int32(context.round))
    return len(data)


def device(folder: Path, train: Any = counting, more: str = "") -> Aggregator:
    return Aggregator(folder, task_of(train=train), plan_of(more))


def kept(handler: AssignmentHandler) -> tuple[int, dict[str, Any]]:
    """The sequence of the last reply and the state that this disk holds."""
    _, state = handler.runs.open(RUN, lambda line: None)
    return state.sequence, {name: array.tolist() for name, array in state.context.items()}


def trained(aggregator: Aggregator, *rounds: int, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """What the device keeps after each of these rounds, each in a process of its own."""
    found = []
    for number in rounds:
        reply, _ = aggregator.answer(aggregator.handler(**options), aggregator.assign(number))
        assert not isinstance(reply, Failure), reply.text
        found.append(kept(aggregator.handler(**options)))
    return found


def test_a_training_finds_what_the_last_one_left_over_restarts(tmp_path: Path) -> None:
    assert trained(device(tmp_path), 1, 2, 5) == [
        (1, {"times": 1, "rounds": [1]}), (2, {"times": 2, "rounds": [1, 2]}), (3, {"times": 3, "rounds": [1, 2, 5]}),
    ]  # fmt: skip


def test_it_outlives_its_run_and_a_run_that_begins_with_its_model_takes_it_along(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    for number in (1, 2):
        aggregator.answer(aggregator.handler(), aggregator.assign(number, identity="own"))
    ended = aggregator.assign(3, kind="stop", identity="own").assignment
    aggregator.handler().stop(ended, aggregator.said.append)
    assert kept(aggregator.handler()) == (2, {}), "it is in a file of its own"
    (one,) = kept_runs(tmp_path / "device")
    assert (one.run, one.is_open, one.personal) == (RUN, False, 0)
    later = Aggregator(tmp_path, task_of(train=counting), plan_of(run=f'init = "run:{RUN}"'))
    later.answer(handler := later.handler(), later.assign(1, run="small-2"))
    _, state = handler.runs.open("small-2", lambda line: None)
    assert (state.sequence, int(state.context["times"])) == (1, 3)
    aggregator.answer(handler := aggregator.handler(), aggregator.assign(4, identity="own"))
    assert kept(handler) == (3, {"times": 3, "rounds": [1, 2, 4]}), "the run was extended"


def test_a_repeated_a_withdrawn_and_a_failed_assignment_move_nothing(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    (before,) = trained(aggregator, 1)
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign(1))
    assert kept(handler) == before, "it was answered before"
    with pytest.raises(Cancelled):
        handler.handle(aggregator.assign(2), lambda: True, aggregator.said.append)
    assert kept(handler) == kept(aggregator.handler()) == before

    def broken(model: nn.Module, data: Any, context: Any) -> int:
        context.state["rounds"][:] = 99
        return 1 // 0

    other = device(tmp_path, broken)
    reply, _ = other.answer(other.handler(), other.assign(2))
    assert isinstance(reply, Failure)
    assert kept(aggregator.handler()) == before


def test_a_state_that_is_changed_in_place_moves_with_the_reply_only(tmp_path: Path) -> None:
    leaked: list[Any] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        context.state.setdefault("sums", np.zeros(2))[:] += 1
        leaked.append(context.state["sums"])
        return len(data)

    aggregator = device(tmp_path, train)
    handler = aggregator.handler()
    for number in (1, 2):
        aggregator.answer(handler, aggregator.assign(number))
        leaked[-1][:] = 50  # after the training, by a thread of the task for instance
    assert kept(handler) == (2, {"sums": [2.0, 2.0]})


@pytest.mark.parametrize("outcome", ["aggregated", "dropped", "unknown"])
def test_no_outcome_moves_it_back(tmp_path: Path, outcome: str) -> None:
    aggregator = device(tmp_path)
    (before,) = trained(aggregator, 1)
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign(2, kind="evaluate", outcomes=[(1, outcome)]))
    assert kept(handler)[1] == before[1]


def test_a_kill_at_any_write_leaves_the_state_of_one_of_two_commits_and_the_same_assignment_ends_alike(
    tmp_path: Path,
) -> None:
    died = killed_at_each_write(tmp_path, device, trained, kept, writes=8)
    assert died >= 3, "the parts, the arrays and the state are written one after the other"


def test_lost_and_older_state_begins_empty_and_the_reply_says_so(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    trained(aggregator, 1, 2)
    for path in (tmp_path / "device" / "runs" / RUN).glob("context-*"):
        path.unlink()
    reply, _ = aggregator.answer(handler := aggregator.handler(), aggregator.assign(3))
    assert reply.lost == "damaged"
    assert kept(handler) == (3, {"times": 1, "rounds": [3]})
    behind = aggregator.handler()
    behind.continue_sequences({RUN: 7})
    reply, _ = aggregator.answer(behind, aggregator.assign(8))
    assert reply.lost == "older"
    assert kept(behind) == (8, {"times": 1, "rounds": [8]})


def test_it_ends_with_its_run_and_another_run_of_the_name_begins_empty(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    trained(aggregator, 1)
    aggregator.answer(handler := aggregator.handler(), aggregator.assign(2, identity="another"))
    assert kept(handler)[1] == {"times": 1, "rounds": [2]}
    handler.stop(aggregator.assign(3, kind="stop", identity="another").assignment, aggregator.said.append)
    assert kept(handler)[1] == {}


def test_with_overlap_it_follows_the_order_of_training(tmp_path: Path) -> None:
    handler = (aggregator := device(tmp_path, more="overlap = { max_delay = 1 }")).handler()
    begun = [handler.begin(aggregator.assign(n), lambda: False, aggregator.said.append) for n in (1, 2)]
    assert kept(handler) == (0, {}), "nothing is committed before it is sent"
    for one, rounds in zip(begun, ([1], [1, 2]), strict=True):
        assert isinstance(one, Begun)
        assert isinstance(one.outcome, Trained)
        handler.finish(one)
        assert kept(handler)[1]["rounds"] == rounds


def test_a_state_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    def train(model: nn.Module, data: Any, context: Any) -> int:
        context.state["same"] = np.arange(3)
        return len(data)

    aggregator = device(tmp_path, train)
    names = []
    for number in (1, 2):
        trained(aggregator, number)
        names.append(sorted(path.name for path in (tmp_path / "device" / "runs" / RUN).glob("context-*")))
    assert names[0] == names[1] == ["context-1-0.safetensors"]


def test_the_owner_bounds_it(tmp_path: Path) -> None:
    aggregator = device(tmp_path)
    small = AdmissionController(Policy(max_state_mb=10e-6, min_free_disk_mb=0))
    failure, _ = aggregator.answer(aggregator.handler(admission=small), aggregator.assign(1))
    assert (failure.kind, failure.text) == ("task-error", "context.state holds more than this device keeps")
    assert "12 bytes, and [policy] max_state_mb of client.toml allows 1e-05 MB" in aggregator.said[-1]
    trained(aggregator, 1)
    failure, _ = aggregator.answer(aggregator.handler(admission=small), aggregator.assign(2))
    assert (failure.kind, failure.text.partition(":")[0]) == ("declined", "max_state_mb")


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (None, "holds None"), ({1: np.zeros(1)}, "a name that is not valid"), ({"": np.zeros(1)}, "a name that is not"),
        ({"__metadata__": np.zeros(1)}, "a name that is not valid"), ({"x" * 65: np.zeros(1)}, "a name that is not"),
        ({"a": [1, 2]}, "holds a list of 2"), ({"a": np.array(["text"])}, "holds an array of shape"),
        ({"a": np.array([object()])}, "an array"), ({"a": 1j}, "holds a complex"), ({"a": 2**70}, "holds an int"),
        ({"a": np.zeros(3, np.complex64)}, "an array"), ({"a": np.zeros(2, "M8[s]")}, "an array"),
        ({"a": nn.Linear(1, 1).weight}, "a tensor of shape"), ({"a": np.zeros(200)}, "more than this device keeps"),
        (dict.fromkeys(map(str, range(1025)), 1), "too many arrays"),
    ],
)  # fmt: skip
def test_what_is_no_named_array_of_numbers_is_refused(state: Any, what: str) -> None:
    with pytest.raises(BadTask, match=f"context.state .*{what}|context.state {what}"):
        copied(state, 1000)


def sent(arrays: Any) -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        FramedSocket(ours).send({}, np.arange(2, dtype=np.float32), arrays=arrays)
        wire = FramedSocket(theirs)
        header = wire.header()
        wire.vectors(header, [2])
        return wire.arrays(header, 10_000)


def test_every_kind_of_array_travels_with_its_bits(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    arrays = copied(
        {
            **{dtype: draw.integers(0, 2, (2, 3)).astype(dtype)[:, ::2] for dtype in DTYPES},
            "big": np.arange(3, dtype=">i4"), "none": np.zeros((0, 4)), "one": np.float32(np.nan), "yes": True, "n": 7,
        },
        10_000,
    )  # fmt: skip
    assert are_equal(sent(arrays), arrays)
    assert sent(None) is None
    assert sent({}) == {}

    def train(model: nn.Module, data: Any, context: Any) -> int:
        if context.round == 2:
            assert are_equal(context.state, arrays)
            assert list(context.state) == list(arrays)
        context.state = dict(arrays)
        return len(data)

    trained(device(tmp_path, train), 1, 2)


@pytest.mark.parametrize(
    "raw",
    [
        3, [["a"]], [["a", "<f4", 3]], [["a", "|O8", [1]]], [["a", "<f4", [-1]]], [["a", "<f4", [True]]],
        [["a", "<f4", [10**9, 10**9]]], [["a", "<f8", [2]]], [["a", "<f4", [1]]] * 2, [[["a"], "<f4", [1]]],
        [["a", "<f4", [1] * 33]], [[str(number), "|u1", [0]] for number in range(1025)],
    ],
)  # fmt: skip
def test_a_description_that_is_none_is_refused_before_anything_is_allocated(raw: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        allocated(raw, 15)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BadFrame):
        FramedSocket(theirs).arrays({"arrays": raw}, 15)
