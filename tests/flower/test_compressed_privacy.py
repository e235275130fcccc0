"""Tests of Flower's own noise beside compressed updates: it is in every update that counts, or no update counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity

from tests.flower.test_compressed_app import Wire
from thinwire.flower import mod, wrap

NOISE = {"clipping_norm": 1e-6, "sensitivity": 1.0, "epsilon": 1e-3, "delta": 0.5}  # a deviation of 1354


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_run_id", 1), ("_task_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)


def chained(*mods: Any) -> Callable[[Message, Context, Any], Message]:
    """The mods of a ClientApp as one, the first one outside."""
    first, *rest = mods
    if not rest:
        return lambda message, context, app: first(message, context, app)
    inner = chained(*rest)
    return lambda message, context, app: first(message, context, lambda message, context: inner(message, context, app))


def trains(moves: Callable[[ArrayRecord], ArrayRecord]) -> Callable[[Message, Context], Message]:
    """The app of a client."""

    def app(message: Message, context: Context) -> Message:
        made = moves(message.content.array_records["arrays"])
        content = RecordDict({"arrays": made, "metrics": MetricRecord({"num-examples": 10, "loss": 0.5})})
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("other", [None, np.int64, np.complex64])
@pytest.mark.parametrize("down", ["identity", "fp16", "int8"])
def test_noise_that_a_client_adds_to_what_is_no_update_any_more_fails_its_client(down: str, other: Any) -> None:
    """Before mod(), LocalDpMod gets replies whose float arrays are in frames: its noise was in the others alone."""
    arrays = {"w": Array(np.zeros(1000, np.float32))}
    arrays |= {} if other is None else {"other": Array(np.zeros(1, other))}

    def moves(record: ArrayRecord) -> ArrayRecord:
        return ArrayRecord({name: Array(array.numpy() + array.numpy().dtype.type(1)) for name, array in record.items()})

    client = chained(LocalDpMod(**NOISE), mod())
    strategy = wrap(FedAvg(), "int8", down=down)
    grid: Any = Wire(lambda record, node: record)
    messages = strategy.configure_train(1, ArrayRecord(arrays), ConfigRecord(), grid)
    for message in messages:
        context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
        reply = client(copy.deepcopy(message), context, trains(moves))
        assert reply.error.reason == "LocalDpMod expects exactly one ArrayRecord, but found 2 ArrayRecord(s)."


@pytest.mark.parametrize("down", ["identity", "fp16", "int8"])
def test_noise_that_a_client_adds_inside_of_the_codec_is_in_its_update(down: str) -> None:
    wire = Wire(
        lambda record, node: ArrayRecord({"w": Array(record["w"].numpy() + np.float32(1.0))}),
        chained(mod(), LocalDpMod(**NOISE)),
    )
    strategy = wrap(FedAvg(), "int8", down=down)
    first = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})
    messages = strategy.configure_train(1, first, ConfigRecord(), wire)  # type: ignore[arg-type]
    found, _ = strategy.aggregate_train(1, wire.send_and_receive(messages))
    assert found is not None
    assert np.std(found["w"].numpy()) == pytest.approx(1354 / 3**0.5, rel=0.1)


def test_the_privacy_of_the_server_side_clips_decoded_updates_inside_of_wrap_and_fails_around_it() -> None:
    def private(strategy: Strategy) -> Strategy:
        return DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, clipping_norm=0.5, num_sampled_clients=2)

    wire: Any = Wire(lambda record, node: ArrayRecord({"w": Array(record["w"].numpy() + np.float32(1.0))}))
    first = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})

    def after_a_round(strategy: Strategy) -> Any:
        messages = list(strategy.configure_train(1, first, ConfigRecord(), wire))
        return strategy.aggregate_train(1, wire.send_and_receive(messages))[0]

    assert np.linalg.norm(after_a_round(wrap(private(FedAvg()), "int8"))["w"].numpy()) == pytest.approx(0.5, rel=0.01)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        after_a_round(private(wrap(FedAvg(), "int8")))
