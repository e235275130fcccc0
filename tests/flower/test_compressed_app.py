"""Tests of two lines in a Flower app: what its strategy gets, with real messages, contexts and strategies."""

from __future__ import annotations

import copy
import logging
import random
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    Strategy,
)
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from thinwire.core.errors import BadPayload, CodecError, ThinwireError, UsageError
from thinwire.flower import float_arrays, mod, wrap
from thinwire.flower.compressed_app import OURS

NODES = (11, 22, 33)
Floats = NDArray[np.float32]
Train = Callable[[ArrayRecord, int], ArrayRecord]


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages take their run and sender from the task of their process."""
    for name, value in (("_run_id", 1), ("_task_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)


class Wire:
    """A grid of nodes with their contexts, which loses the replies that it is told to lose."""

    def __init__(self, train: Train, client: Any = None, lost: Iterable[tuple[int, int]] = ()) -> None:
        self.train, self.client, self.lost = train, client or mod(), set(lost)
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in NODES}
        self.up = self.frames = 0
        self.round = 0

    def get_node_ids(self) -> Iterable[int]:
        return NODES

    def send_and_receive(self, messages: Iterable[Message], timeout: float | None = None) -> Iterable[Message]:
        self.round += 1
        assert len(list(messages)) == len(list(messages)), "Flower's grid reads them more than once"
        replies = [self.answer(message) for message in messages]
        return [one for one in replies if (self.round, one.metadata.src_node_id) not in self.lost]

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        message = copy.deepcopy(message)  # another process gets it

        def app(message: Message, context: Context) -> Message:
            assert OURS not in message.content, "the app sees a record of ours"
            made = self.train(message.content.array_records["arrays"], node)
            content = RecordDict({"arrays": made, "metrics": MetricRecord({"num-examples": 10, "loss": 0.5})})
            return Message(content, reply_to=message)

        reply = self.client(message, self.contexts[node], app)
        self.up += sum(record.count_bytes() for record in reply.content.array_records.values())
        for record in reply.content.config_records.values():
            self.frames += sum(map(len, record.get("frames", [])))  # type: ignore[arg-type]
        return reply


def model(value: float = 0.0, size: int = 3000) -> ArrayRecord:
    """A model with a count between two float arrays, as of BatchNorm, and one of float64."""
    return ArrayRecord({
        "w": Array(np.full((size, 2), value, np.float32)),
        "seen": Array(np.array([3], np.int64)),
        "b": Array(np.full(5, value, np.float64)),
    })  # fmt: skip


def moved(record: ArrayRecord, node: int, rng: np.random.Generator) -> ArrayRecord:
    made = {name: array.numpy().copy() for name, array in record.items()}
    made["w"] += rng.normal(size=made["w"].shape).astype(np.float32) * np.float32(0.01) + np.float32(0.001 * node)
    made["b"] += 0.5
    made["seen"] = made["seen"].astype(np.int64) + 1  # as torch does: Flower's mean has made it float64
    return ArrayRecord({name: Array(values) for name, values in made.items()})


def frames_of(message: Message) -> list[bytes]:
    frames = message.content.config_records[OURS]["frames"]
    assert isinstance(frames, list)
    return [one for one in frames if isinstance(one, bytes)]


def trained(seed: int = 0) -> Train:
    """The same changes in each run with this seed, whatever the model is."""
    rngs = {node: np.random.default_rng([seed, node]) for node in NODES}
    return lambda record, node: moved(record, node, rngs[node])


def run(strategy: Strategy, wire: Wire, rounds: int = 3) -> ArrayRecord:
    random.seed(1)  # the order of the nodes is drawn, and so is the order of a sum
    arrays = model()
    for number in range(1, rounds + 1):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), wire)  # type: ignore[arg-type]
        found, metrics = strategy.aggregate_train(number, wire.send_and_receive(messages))
        assert found is not None and metrics is not None and metrics["loss"] == 0.5
        arrays = found
    return arrays


def plain(message: Message, context: Context, call_next: Any) -> Message:
    made: Message = call_next(message, context)
    return made


def unreached(message: Message, context: Context) -> Message:
    raise AssertionError("the app was called")


@pytest.mark.parametrize("kind", [FedAvg, FedAdam, FedMedian, Krum])
def test_identity_gives_the_strategy_the_bits_that_it_would_get_without_us(kind: Callable[[], Strategy]) -> None:
    ours = run(wrap(kind(), "identity"), Wire(trained()))
    theirs = run(kind(), Wire(trained(), client=plain))
    assert list(ours) == list(theirs) == ["w", "seen", "b"], "the order of arrays"
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name].numpy(), array.numpy())
        assert ours[name].dtype == array.dtype


def test_with_feedback_the_sum_of_what_arrives_follows_the_sum_of_what_was_sent() -> None:
    dense, wire = run(FedAvg(), Wire(trained(), client=plain), 12), Wire(trained())
    near_strategy: Any = wrap(FedAvg(), "topk(0.2) > int8")
    near = run(near_strategy, wire, 12)
    apart = np.linalg.norm(near["w"].numpy() - dense["w"].numpy()) / np.linalg.norm(dense["w"].numpy())
    without = Wire(trained())
    forgetful = wrap(FedAvg(), "topk(0.2) > int8")
    for context in without.contexts.values():
        context.state = RecordDict()
    arrays = model()
    for number in range(1, 13):
        for context in without.contexts.values():
            context.state = RecordDict()  # a SuperNode that restarts each round
        messages = forgetful.configure_train(number, arrays, ConfigRecord(), without)  # type: ignore[arg-type]
        found, _ = forgetful.aggregate_train(number, without.send_and_receive(messages))
        assert found is not None
        arrays = found
    lost = np.linalg.norm(arrays["w"].numpy() - dense["w"].numpy()) / np.linalg.norm(dense["w"].numpy())
    assert apart < 0.7 * lost
    assert wire.up + wire.frames < 0.2 * 12 * len(NODES) * 6000 * 4
    floats = 12 * len(NODES) * 6005  # and never the count
    assert (near_strategy.uplink_payload, near_strategy.uplink_dense) == (wire.frames, 4 * floats)


def test_an_update_that_was_lost_goes_back_into_the_residual() -> None:
    """Node 11 is lost in round 2: its next residual is the one before that update, as if it had not trained."""
    wire = Wire(trained(), lost=[(2, 11)])
    strategy, arrays, residuals = wrap(FedAvg(), "topk(0.1)"), model(), list[Floats]()
    for number in range(1, 4):
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), wire))  # type: ignore[arg-type]
        told = {one.metadata.dst_node_id: one.content[OURS]["reached"] for one in messages}
        assert told[11] == {1: 0, 2: 1, 3: 1}[number]
        assert told[22] == number - 1
        found, _ = strategy.aggregate_train(number, wire.send_and_receive(messages))
        assert found is not None
        arrays = found
        before = wire.contexts[11].state.array_records["thinwire.before"]
        residuals.append(before.get("0/residual", Array(np.zeros(1))).numpy())
    np.testing.assert_array_equal(residuals[2], residuals[1])
    assert np.any(residuals[2])


def test_a_second_strategy_of_an_app_begins_without_the_residual_of_the_first() -> None:
    """It knows of no update that came. So it called the last one lost, and what that had brought was sent once more."""
    wire = Wire(trained())
    arrays = run(wrap(FedAvg(), "topk(0.1)"), wire, rounds=3)
    second = wrap(FedAvg(), "topk(0.1)")
    for number in (1, 2):
        messages = second.configure_train(number, arrays, ConfigRecord(), wire)  # type: ignore[arg-type]
        found, _ = second.aggregate_train(number, wire.send_and_receive(messages))
        assert found is not None
        arrays = found
        assert bool(wire.contexts[11].state.array_records["thinwire.before"]) == (number > 1)


@pytest.mark.parametrize("spec", ["topk(0.1) > int8 > rice", "eden(1)", "powersgd(2)"])
def test_a_message_that_is_answered_twice_gives_the_same_bits_twice(spec: str) -> None:
    """A SuperNode that was killed between its answer and its delivery trains again."""
    strategy, wire, arrays = wrap(FedAvg(), spec), Wire(trained()), model()
    for number in (1, 2):
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), wire))  # type: ignore[arg-type]
        again = [Message(RecordDict(dict(one.content)), 11, "train") for one in messages[:1]]
        again[0].metadata.__dict__["_dst_node_id"] = messages[0].metadata.dst_node_id
        wire.train = trained(number)
        first = wire.answer(messages[0])
        wire.train = trained(number)
        second = wire.answer(again[0])
        assert frames_of(first) == frames_of(second)
        found, _ = strategy.aggregate_train(number, [second, *map(wire.answer, messages[1:])])
        assert found is not None
        arrays = found


def test_an_app_may_write_into_its_message_and_return_that() -> None:
    def in_place(record: ArrayRecord, node: int) -> ArrayRecord:
        record["w"] = Array(record["w"].numpy() + np.float32(1))
        return record

    strategy, wire = wrap(FedAvg(), "int8"), Wire(in_place)
    found, _ = strategy.aggregate_train(
        1,
        wire.send_and_receive(strategy.configure_train(1, model(), ConfigRecord(), wire)),  # type: ignore[arg-type]
    )
    assert found is not None
    np.testing.assert_allclose(found["w"].numpy(), 1.0, atol=0.02)


def test_arrays_of_other_shapes_are_sent_whole_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    strategy, wire = wrap(FedAvg(), "int8"), Wire(lambda record, node: model(size=7))
    with caplog.at_level(logging.WARNING, "thinwire.flower"):
        replies = wire.send_and_receive(strategy.configure_train(1, model(), ConfigRecord(), wire))  # type: ignore[arg-type]
    assert "float arrays ['w'] are sent whole" in caplog.text
    found, _ = strategy.aggregate_train(1, replies)
    assert found is not None and found["w"].shape == (7, 2)


def test_two_strategies_of_a_run_draw_their_own_randomness_both_ways() -> None:
    """Rounding errors that were equal would not average out over strategies and runs."""
    arrays = ArrayRecord({"w": Array(np.random.default_rng(5).normal(size=(400, 3)).astype(np.float32))})
    wire = Wire(lambda record, node: ArrayRecord({"w": Array(2 * record["w"].numpy())}))

    def first_message(strategy: Strategy) -> Message:
        messages = strategy.configure_train(1, arrays, ConfigRecord(), wire)  # type: ignore[arg-type]
        return next(one for one in messages if one.metadata.dst_node_id == NODES[0])

    down = [frames_of(first_message(wrap(FedAvg(), "identity", down="int8"))) for _ in range(2)]
    up = [frames_of(wire.answer(first_message(wrap(FedAvg(), "int8")))) for _ in range(2)]
    assert down[0] != down[1]
    assert up[0] != up[1]


@pytest.mark.parametrize("down", ["fp16", "int8"])
def test_a_compressed_model_is_what_the_app_gets_and_what_the_update_is_added_to(down: str) -> None:
    got = list[ArrayRecord]()

    def still(record: ArrayRecord, node: int) -> ArrayRecord:
        got.append(record)
        return record

    rng = np.random.default_rng(5)
    first = ArrayRecord({
        "w": Array(rng.normal(size=(400, 3)).astype(np.float32)), "seen": Array(np.array([3], np.int64)),
        "b": Array(rng.normal(size=7).astype(np.float32)),
    })  # fmt: skip
    wire, strategy = Wire(still), wrap(FedAvg(), "identity", down=down)
    messages = list(strategy.configure_train(1, first, ConfigRecord(), wire))  # type: ignore[arg-type]
    size = sum(len(frame) for frame in frames_of(messages[0]))
    assert size < {"fp16": 0.55, "int8": 0.35}[down] * 4 * 1207
    found, _ = strategy.aggregate_train(1, wire.send_and_receive(messages))
    assert found is not None
    for record in got:
        assert list(record) == list(first)
        np.testing.assert_allclose(record["w"].numpy(), first["w"].numpy(), atol=0.05)
    np.testing.assert_allclose(found["w"].numpy(), got[0]["w"].numpy(), atol=1e-6)
    assert np.array_equal(found["seen"].numpy(), [3])


def test_other_messages_and_clients_without_a_wrapped_strategy_pass_unchanged() -> None:
    content = RecordDict({"arrays": model(1.0), "config": ConfigRecord({"lr": 0.1})})
    context = Context(1, 11, {}, RecordDict(), {})
    for kind, record in (("evaluate", {OURS: ConfigRecord({"spec": "int8", "reached": 0})}), ("train", {})):
        message = Message(RecordDict({**content, **record}), message_type=kind, dst_node_id=11)
        seen = list[Message]()

        def app(message: Message, context: Context, seen: list[Message] = seen) -> Message:
            seen.append(message)
            return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

        reply = mod()(message, context, app)
        assert seen == [message]
        assert reply.content["arrays"] is content["arrays"]
    assert not context.state


def test_an_app_that_fails_sends_its_error_and_keeps_its_residual() -> None:
    strategy, wire = wrap(FedAvg(), "topk(0.1)"), Wire(trained())
    (message, *_) = strategy.configure_train(1, model(), ConfigRecord(), wire)  # type: ignore[arg-type]
    failed = mod()(message, wire.contexts[11], lambda message, _: Message(Error(2, "no"), reply_to=message))
    assert failed.has_error() and not wire.contexts[11].state
    assert list(strategy._decoded([failed])) == [failed]  # type: ignore[attr-defined]


def test_a_frame_that_is_none_leaves_out_its_client_only(caplog: pytest.LogCaptureFixture) -> None:
    strategy, wire = wrap(FedAvg(), "int8"), Wire(trained())
    replies = list(wire.send_and_receive(strategy.configure_train(1, model(), ConfigRecord(), wire)))  # type: ignore[arg-type]
    hostile: list[dict[str, Any]] = [
        {"frames": [b"x" * 40]}, {"frames": []}, {"frames": 3}, {"records": ["other"] * 3}, {"records": 7},
        {"arrays": ["w", "seen", "w"]}, {"shapes": ["3000,2", "1", "100000000"]}, {"dtypes": ["float32"] * 3},
        {"records": ["arrays"] * 600, "arrays": ["w"] * 600, "dtypes": ["float32"] * 600, "shapes": ["3000,2"] * 600},
        {"frames": [frames_of(replies[0])[0][:-1]]},
    ]  # fmt: skip
    honest = dict(replies[0].content.config_records[OURS])
    for change in hostile:
        replies[0].content[OURS] = ConfigRecord({**honest, **change})
        tracemalloc.start()
        with caplog.at_level(logging.WARNING, "thinwire.flower"):
            failed, *others = strategy._decoded(replies)  # type: ignore[attr-defined]
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert taken < 5e6, f"{change.keys()} ask for more memory than the model has"
            assert failed.has_error() and failed.metadata.src_node_id == replies[0].metadata.src_node_id
            assert not any(one.has_error() for one in others), "the other clients' updates count"
        assert f"the update of node {replies[0].metadata.src_node_id} is left out" in caplog.text
        caplog.clear()


def test_a_strategy_s_own_start_and_attributes_stay() -> None:
    class Mine(FedAvg):
        def start(self, *arguments: Any, **more: Any) -> Any:
            self.begun = super().start(*arguments, **more)
            return self.begun

    given = Mine(fraction_evaluate=0.0)
    strategy = wrap(given, "topk(0.5)")
    assert isinstance(strategy, Mine) and strategy.fraction_evaluate == 0.0
    result = strategy.start(grid=Wire(trained()), initial_arrays=model(), num_rounds=2)
    assert strategy.begun is result and not hasattr(given, "begun")
    assert float(result.arrays["b"].numpy()[0]) == pytest.approx(1.0)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: wrap(LegacyFedAvg()), "no strategy of Flower's message API"),  # type: ignore[arg-type]
    (lambda: wrap(FedAvg), "FedAvg is a class"),  # type: ignore[arg-type]
    (lambda: wrap(FedXgbBagging()), "sends trees"),
    (lambda: wrap(FedXgbCyclic()), "sends trees"),
    (
        lambda: wrap(DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 2)),
        "clips on the clients",
    ),
    (lambda: wrap(DifferentialPrivacyServerSideFixedClipping(FedXgbBagging(), 1.0, 1.0, 2)), "sends trees"),
    (lambda: wrap(FedAvg(), down="topk(0.1)"), "a codec that keeps no state"),
    (lambda: wrap(FedAvg(), "topq(0.1)"), "topq"),
    (lambda: mod("nothing"), "nothing"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_compressed_is_refused_with_the_reason(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((UsageError, CodecError)) as refused:
        call()
    assert words in refused.value.text()
    assert refused.value.hint


@pytest.mark.parametrize("change", [
    {"down": "topk(0.000001)"}, {"down": 3}, {"shapes": ["100000000000,3", "", "5"]}, {"shapes": ["-1,2", "", "5"]},
    {"shapes": ["3000,2"]}, {"frames": []}, {"frames": [b"TW" * 20]}, {"records": [1.0]}, {"reached": "x"},
])  # fmt: skip
def test_a_hostile_message_is_refused_before_memory_is_taken(change: dict[str, Any]) -> None:
    strategy, wire = wrap(FedAvg(), "int8", down="int8"), Wire(trained())
    (message, *_) = strategy.configure_train(1, model(), ConfigRecord(), wire)  # type: ignore[arg-type]
    told = message.content.config_records[OURS]
    message.content[OURS] = ConfigRecord({**told, **change})
    tracemalloc.start()
    try:
        with pytest.raises(ThinwireError):
            mod()(message, wire.contexts[11], unreached)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_frames_than_the_model_has_segments_is_refused_by_its_count(count: int) -> None:
    with pytest.raises(BadPayload, match=f"{count} frames, and the model has 1 segments"):
        float_arrays.Floats.of({"arrays": model()}).decode("int8", [b"TW" * 20] * count)


def test_two_codecs_and_client_side_clipping_are_refused_on_the_client() -> None:
    strategy, wire = wrap(FedAvg(), "int8"), Wire(trained())
    (message, *_) = strategy.configure_train(1, model(), ConfigRecord(), wire)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the strategy expects int8"):
        mod("topk(0.1)")(message, wire.contexts[11], unreached)
    assert list(run(wrap(FedAvg(), "topk(0.10)>int8"), Wire(trained(), client=mod("topk(0.1) > int8")), 1))
    message.content["secaggplus_configs"] = ConfigRecord({"stage": "setup"})
    with pytest.raises(UsageError, match="secaggplus_mod"):
        mod()(message, wire.contexts[11], unreached)
    del message.content["secaggplus_configs"]
    message.content["config"] = ConfigRecord({"clipping_norm": 1.0})
    with pytest.raises(ThinwireError, match="client-side clipping"):
        mod()(message, wire.contexts[11], unreached)
