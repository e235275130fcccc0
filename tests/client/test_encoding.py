"""What a device carries from one update to the next."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.client.payload import encode
from thinwire.client.run_state import ClientRunState, RunFolder
from thinwire.core import Key, Layout
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.types import Failure, ReplyHeader

LAYOUT = Layout.of({"w": (6,)})
ONES = np.ones(6, np.float32)


def test_the_residual_is_aged_by_the_rounds_since_the_last_encode():
    uplink = UplinkSection(feedback="classic", feedback_decay=0.5)
    _, state = encode(ONES.copy(), ClientRunState(), "topk(0.5)", uplink, LAYOUT, Key(1), 4)
    assert (state.encoded_at, np.asarray(state.residual).tolist()) == (4, [0, 0, 0, 1, 1, 1])
    _, state = encode(np.zeros(6, np.float32), state, "topk(0.1)", uplink, LAYOUT, Key(1), 7)
    assert np.asarray(state.residual).tolist() == [0, 0, 0, 0, 0.125, 0.125]


def test_momentum_and_age_are_on_disk_after_a_commit(tmp_path):
    uplink = UplinkSection(feedback="classic", momentum=0.5)
    _, state = encode(ONES.copy(), ClientRunState(), "topk(0.5)", uplink, LAYOUT, Key(1), 1)
    state = replace(state, codec_arrays={"0/own": np.arange(4.0).reshape(2, 2)})
    RunFolder(tmp_path).commit(state)
    found, said = RunFolder(tmp_path).load()
    assert not said
    assert np.asarray(found.momentum).tobytes() == np.asarray(state.momentum).tobytes() == ONES.tobytes()
    assert np.asarray(found.residual).tobytes() == np.asarray(state.residual).tobytes()
    assert found.encoded_at == 1
    assert np.array_equal(found.codec_arrays["0/own"], [[0, 1], [2, 3]])
    assert found.codec_arrays["0/own"].dtype == np.float64


def test_a_switch_of_codec_keeps_residual_and_momentum():
    uplink = UplinkSection(feedback="classic", momentum=0.5)
    _, state = encode(ONES.copy(), ClientRunState(), "topk(0.5)", uplink, LAYOUT, Key(1), 1)
    _, state = encode(np.zeros(6, np.float32), state, "identity", uplink, LAYOUT, Key(1), 2)
    assert np.asarray(state.momentum).tolist() == [0.5] * 6
    assert not np.asarray(state.residual).any()


@pytest.mark.parametrize("feedback", ["none", "classic"])
def test_an_array_of_another_shape_or_type_begins_again(feedback):
    layout, x = Layout.of({"w": (8, 8)}), np.arange(64, dtype=np.float32)
    encoded, uplink = partial(encode, spec="powersgd(1)", layout=layout, key=Key(1)), UplinkSection(feedback=feedback)
    fresh, state = encoded(x.copy(), ClientRunState(), uplink=uplink)
    (name,) = state.codec_arrays
    for array in (np.ones((9, 1), np.float32), np.ones((8, 1), np.float64)):
        frames, _ = encoded(x.copy(), ClientRunState(codec_arrays={name: array}), uplink=uplink)
        assert frames == fresh
    frames, _ = encoded(x.copy(), ClientRunState(codec_arrays={name: np.ones((8, 1), np.float32)}), uplink=uplink)
    assert frames != fresh


def test_without_feedback_nothing_is_carried():
    _, state = encode(ONES.copy(), ClientRunState(), "topk(0.5)", UplinkSection(feedback="none"), LAYOUT, Key(1), 1)
    assert (state.residual, state.momentum, dict(state.codec_arrays)) == (None, None, {})


def test_with_ef21_the_residual_is_the_reference():
    _, state = encode(ONES.copy(), ClientRunState(), "topk(0.5)", UplinkSection(feedback="ef21"), LAYOUT, Key(1), 1)
    assert np.asarray(state.residual).tolist() == [1, 1, 1, 0, 0, 0]


def test_with_ef21_a_reference_of_an_earlier_assignment_begins_again_and_what_was_sent_of_it_counts_no_more(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(codec="topk(0.2)", feedback="ef21"))
    handler = aggregator.handler()
    for number in (1, 2):
        assert isinstance(aggregator.answer(handler, aggregator.assign(number))[0], ReplyHeader)
    _, bundle = aggregator.answer(handler, aggregator.assign(3, outcomes=[(1, "dropped")], references_from=3))
    fresh = Aggregator(tmp_path / "fresh", task_of(), aggregator.plan)
    _, expected = fresh.answer(fresh.handler(), fresh.assign(3))
    assert bundle.read_bytes() == expected.read_bytes()
    state = handler.runs[RUN][1]
    assert (state.references_from, [entry.round for entry in state.outbox]) == (3, [3])
    aggregator.answer(handler, aggregator.assign(4, references_from=3))
    assert [entry.round for entry in handler.runs[RUN][1].outbox] == [3, 4]


def test_with_ef21_a_device_that_lost_what_it_sent_says_so_and_does_not_begin_again(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(codec="topk(0.2)", feedback="ef21"))
    handler = aggregator.handler()
    handler.continue_sequences({RUN: 3})
    reply, bundle = aggregator.answer(handler, aggregator.assign())
    assert isinstance(reply, Failure)
    assert (reply.kind, bundle) == ("state-lost", None)
