"""What a device keeps for SCAFFOLD and FedDyn: the sum of what was sent and not dropped, or it says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.aggregation.control_variates import Scaffold, algorithm_of, own_segments, transmitted_layout
from thinwire.aggregation.downlink import write_model
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import parts_of
from thinwire.client.run_state import write_behind_folder
from thinwire.compression import parse
from thinwire.core import RunPlan
from thinwire.core.errors import DataLost
from thinwire.core.fleet import Delivery
from thinwire.core.statedir import write_atomically
from thinwire.core.types import ReplyHeader, Vector

CODECS = ("identity", "topk(0.2) > int8")
BOTH = pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])


def of(algorithm: str, codec: str = "identity", feedback: str = "classic") -> RunPlan:
    return plan_of("[cohort]\nlate = 'drop'", codec, feedback, run=f"algorithm = '{algorithm}'")


class Other(Aggregator):
    """Sends what travels: under SCAFFOLD a control variate of 0.01 behind the model."""

    def assign(self, round_number: int = 1, *given: Any, common: float = 0.01, **changed: Any) -> Delivery:
        delivery = super().assign(round_number, *given, **changed)
        travels, path = (
            transmitted_layout(algorithm_of(self.plan), self.first.layout),
            self.folder / f"t{round_number}.model",
        )
        params = np.full(travels.size, common, np.float32)
        params[: travels.model_size] = self.first.vector
        parts, digest = write_model(path, travels, params, self.first.buffers)
        fields = {**vars(delivery.assignment), "parts": tuple(parts), "base_digest": digest}
        return Delivery(type(delivery.assignment)(**fields), path)

    def decoded(self, header: ReplyHeader, body: Path) -> Vector:
        """Of the vector that is followed."""
        algorithm = algorithm_of(self.plan)
        assert algorithm is not None
        travels = transmitted_layout(algorithm, self.first.layout)
        payloads = dict(parts_of(body, header.parts))
        codec = parse(header.codec).bind(travels)
        segments = own_segments(algorithm, travels)
        return np.concatenate([codec.decode(payloads[f"frame/{s.index}"], s.index) for s in segments])


def own(handler: AssignmentHandler) -> Vector:
    kept = handler.runs[RUN][1].own
    assert kept is not None
    return kept


def rounds(other: Other, handler: AssignmentHandler, outcomes: Sequence[Sequence[tuple[int, Any]]]) -> list[Vector]:
    """A round for each list of outcomes that come with its assignment; what was sent in each."""
    sent = []
    for number, told in enumerate(outcomes, 1):
        header, body = other.answer(handler, other.assign(number, outcomes=told))
        assert isinstance(header, ReplyHeader), header
        sent.append(other.decoded(header, body))
    return sent


@BOTH
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("feedback", ["classic", "none"])
def test_it_is_the_sum_of_what_was_sent_and_not_dropped(tmp_path, algorithm, codec, feedback):
    other = Other(tmp_path, task_of(), of(algorithm, codec, feedback))
    handler = other.handler()
    told = [(), [(1, "aggregated")], [(2, "dropped")], [(2, "dropped"), (3, "unknown")]]
    sent = rounds(other, handler, told)
    np.testing.assert_allclose(own(handler), sent[0] + sent[2] + sent[3], rtol=1e-5, atol=1e-6)


@BOTH
def test_a_dropped_update_restores_what_was_before_it(tmp_path, algorithm):
    other = Other(tmp_path, task_of(), of(algorithm))
    handler = other.handler()
    rounds(other, handler, [()])
    before = own(handler).copy()
    other.answer(handler, other.assign(2))
    assert not np.allclose(own(handler), before, atol=1e-3)
    other.answer(handler, other.assign(3, "evaluate", outcomes=[(1, "aggregated"), (2, "dropped")]))
    np.testing.assert_allclose(own(handler), before, rtol=1e-5, atol=1e-6)


def gradient(folder: Path, number: int) -> Vector:
    """A device's own, in the step that it is requested in a round: what it does with nothing to correct."""
    plain = Aggregator(folder / f"plain-{number}", task_of(), plan_of(), steps=1)
    _, body = plain.answer(plain.handler(), plain.assign(number))
    change = np.frombuffer(body.read_bytes()[-4 * plain.first.layout.size :], np.float32)
    return change / np.float32(-0.1)


def corrected(other: Other, handler: AssignmentHandler, number: int, **assigned: Any) -> Vector:
    """The gradient that a device's one step went by, correction and all."""
    header, body = other.answer(handler, other.assign(number, **assigned))
    assert isinstance(header, ReplyHeader), header
    codec = parse("identity").bind(transmitted_layout(algorithm_of(other.plan), other.first.layout))
    return codec.decode(next(data for _, data in parts_of(body, header.parts)), 0) / np.float32(-0.1)


def close(found: Vector, expected: Vector) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_without_a_codec_the_control_variate_is_the_mean_of_the_devices_own_gradients(tmp_path):
    other = Other(tmp_path, task_of(), of("scaffold", feedback="none"), steps=1)
    handler = other.handler()
    close(corrected(other, handler, 1), gradient(tmp_path, 1))
    close(own(handler), gradient(tmp_path, 1))
    before = own(handler).copy()
    close(
        corrected(other, handler, 2, outcomes=[(1, "aggregated")], common=0.25), gradient(tmp_path, 2) - before + 0.25
    )
    close(own(handler), gradient(tmp_path, 2))


@pytest.mark.parametrize("told", [(), [(1, "dropped")], [(1, "unknown")]])
def test_a_device_is_corrected_by_no_mean_that_it_is_not_in(tmp_path, told):
    other = Other(tmp_path, task_of(), of("scaffold", feedback="none"), steps=1)
    handler = other.handler()
    close(corrected(other, handler, 1, common=0.25), gradient(tmp_path, 1))
    first = own(handler).copy()
    close(corrected(other, handler, 2, outcomes=told, common=0.25), gradient(tmp_path, 2))
    close(own(handler), gradient(tmp_path, 2))
    aggregated = [(1, "dropped"), (2, "aggregated")]
    before = own(handler).copy()
    if told != [(1, "dropped")]:
        before -= first
    close(corrected(other, handler, 3, outcomes=aggregated, common=0.25), gradient(tmp_path, 3) - before + 0.25)


def test_a_version_from_before_the_device_counted_corrects_nothing(tmp_path):
    """An assignment of an open round that comes again brings newer outcomes than its version."""
    other = Other(tmp_path, task_of(), of("scaffold", feedback="none"), steps=1)
    handler = other.handler()
    corrected(other, handler, 1)
    aggregated = [(1, "aggregated")]
    close(corrected(other, handler, 3, outcomes=aggregated, base_version=1, common=0.25), gradient(tmp_path, 3))
    again = other.handler()
    close(corrected(other, again, 4, common=0.25), gradient(tmp_path, 4) - own(handler) + 0.25)


def test_after_all_began_again_a_device_is_corrected_when_it_counted_again(tmp_path):
    other = Other(tmp_path, task_of(), of("scaffold", feedback="none"), steps=1)
    handler = other.handler()
    rounds(other, handler, [(), [(1, "aggregated")]])
    close(corrected(other, handler, 3, outcomes=[(2, "aggregated")], references_from=3), gradient(tmp_path, 3))
    close(own(handler), gradient(tmp_path, 3))
    told = {"outcomes": [(2, "aggregated")], "references_from": 3}
    close(corrected(other, handler, 4, **told), gradient(tmp_path, 4))
    before, told = own(handler).copy(), {"outcomes": [(3, "aggregated")], "references_from": 3}
    close(corrected(other, handler, 5, **told, common=0.25), gradient(tmp_path, 5) - before + 0.25)


@pytest.mark.parametrize("common", [None, np.array([3, -1], np.float32)])
def test_what_a_device_wants_is_its_own_gradient_by_whatever_it_was_corrected(common):
    scaffold, held, found = Scaffold(lr=0.25), np.array([1, 2], np.float32), np.array([0.5, 8], np.float32)
    change = np.float32(-0.25) * (found + scaffold.shift(held, common))
    wanted = scaffold.next_own(held, common, change)
    assert wanted is not None
    assert wanted.tolist() == found.tolist()


@BOTH
def test_all_begin_again_where_the_aggregators_mean_does(tmp_path, algorithm):
    other = Other(tmp_path, task_of(), of(algorithm))
    handler = other.handler()
    rounds(other, handler, [(), ()])
    header, body = other.answer(handler, other.assign(3, outcomes=[(1, "dropped")], references_from=3))
    np.testing.assert_allclose(own(handler), other.decoded(header, body), rtol=1e-6)


@BOTH
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("told", ["dropped", "aggregated"])
def test_a_crash_at_any_write_gives_the_same_bytes_and_the_same_memory(tmp_path, algorithm, told, at):
    def life(folder: Path, at: int) -> tuple[bytes, bytes]:
        other, left = Other(folder, task_of(), of(algorithm, CODECS[1])), [at]

        def write(path: Path, data: bytes) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise DataLost("the power went")
            write_atomically(path, data)

        rounds(other, other.handler(), [()])
        assigned = other.assign(2, outcomes=[(1, told)])
        other.answer(other.handler(folders=lambda place, run: write_behind_folder(place, run, write=write)), assigned)
        after = other.handler()
        _, body = other.answer(after, assigned)
        return body.read_bytes(), own(after).tobytes()

    assert life(tmp_path / "crash", at) == life(tmp_path / "whole", -1)


def test_a_task_that_has_its_own_loop_is_refused(tmp_path):
    other = Other(tmp_path, task_of(train=lambda module, data, local: 5), of("scaffold"))
    reply, _ = other.answer(other.handler(), other.assign())
    assert (reply.kind, "train()" in (tmp_path / "device" / "last-error.txt").read_text()) == ("task-error", True)
