"""Asks and replies travel as JSON and come back equal; whatever else arrives is BadPayload."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.errors import BadPayload
from thinwire.core.serialization import (
    MAX_HEAD_BYTES,
    MAX_METRICS,
    ask_from_bytes,
    ask_to_bytes,
    reply_from_bytes,
    reply_to_bytes,
)
from thinwire.core.types import Ask, Failure, Part, ReplyHeader, Timings, Transfer, UpdateId, Verdict, Work

names = st.from_regex(r"[a-z0-9-]{1,12}", fullmatch=True)
int64 = st.integers(-(2**63) + 1, 2**63 - 1)
positive = st.floats(0, 1e30)
update_ids = st.builds(UpdateId, names, names, st.integers(0, 2**40))
parts = st.builds(Part, names, st.integers(0, 2**40), names)
verdicts = st.builds(Verdict, update_ids, st.sampled_from(["folded", "dropped", "unknown"]), st.integers(-1, 99))
asks = st.builds(
    Ask,
    ask_id=names, run=names, task=names, kind=st.sampled_from(["train", "evaluate", "stop"]),
    plan=st.one_of(names, st.dictionaries(names, st.integers())), round=st.integers(0, 10**6),
    work=st.builds(Work, st.integers(0, 100), st.integers(1, 100)), deadline_s=positive,
    parts=st.lists(parts, max_size=3).map(tuple), vectors=st.just(()),
    verdicts=st.lists(verdicts, max_size=3).map(tuple),
)  # fmt: skip
heads = st.builds(
    ReplyHeader,
    ask_id=names, update_id=update_ids, base_version=st.integers(0, 99), examples=st.integers(0, 10**9),
    steps=st.integers(0, 10**6), a=st.floats(0, 1e9), norm=positive,
    metrics=st.dictionaries(names, st.tuples(st.floats(-1e99, 1e99), st.just(0.0) | st.floats(1e-9, 1e30)), max_size=3),
    timings=st.builds(Timings, *[st.floats(0, 1e9)] * 5),
    parts=st.lists(parts, max_size=3).map(tuple), counters=st.dictionaries(names, int64, max_size=2),
    residual_norm=positive, lost=st.sampled_from(["", "older"]),
    transfer=st.none() | st.builds(Transfer, positive, positive, positive, st.none() | int64, int64),
)  # fmt: skip


@pytest.mark.parametrize("said", [1, "true", "", None, []])
def test_a_farewell_is_true_or_false_and_only_said_where_it_is_one(said: object) -> None:
    raw = json.loads(ask_to_bytes(Ask("a", "r", "t", "stop", "digest")))
    assert "farewell" not in raw
    with pytest.raises(BadPayload):
        ask_from_bytes(json.dumps({**raw, "farewell": said}).encode())
    assert ask_from_bytes(json.dumps({**raw, "farewell": True}).encode()).farewell


@given(asks)
def test_an_ask_comes_back_equal(ask: Ask) -> None:
    assert ask_from_bytes(ask_to_bytes(ask)) == ask


@given(heads)
def test_a_reply_head_comes_back_equal(head: ReplyHeader) -> None:
    assert reply_from_bytes(reply_to_bytes(head)) == head


@given(names, names)
def test_a_failure_comes_back_equal(kind: str, ask_id: str) -> None:
    failure = Failure(kind, "in task.py:3", ask_id, device="pi-03", identity=kind)
    assert reply_from_bytes(reply_to_bytes(failure)) == failure


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_arbitrary_bytes_are_bad_payload(data: bytes) -> None:
    for read in (ask_from_bytes, reply_from_bytes):
        with pytest.raises(BadPayload):
            read(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("a", float("nan")), ("norm", float("inf")), ("examples", -1), ("steps", -3), ("update_id", "x"), ("parts", 3),
     ("metrics", {"loss": [float("nan"), 1]}), ("parts", [{"name": "f", "length": -1, "sha256": "", "offset": 0}]),
     ("parts", [{"name": "f", "length": 1, "sha256": "", "offset": 8}]), ("timings", None),
     ("examples", 1e400), ("examples", 2**41), ("a", 1e10), ("base_version", -1), ("steps", 2**63),
     ("update_id", f"r/d/{2**63}"), ("update_id", "r/d/-1"), ("ask_id", "a" * 2000), ("ask_id", "a\n"),
     ("ask_id", "\ud800"), ("lost", "a\n"), ("timings", {"train_s": float("nan")}),
     ("counters", {"n": 10**30}), ("lost", None),
     ("metrics", {"loss": [1e101, 1]}), ("metrics", {"loss": [1, -1]}), ("metrics", {"loss": [1, 1e-300]}),
     ("metrics", {str(i): [1, 1] for i in range(MAX_METRICS + 1)}), ("metrics", {"\x1b[31m": [1, 1]}),
     ("parts", [{"name": "f" * 2000, "length": 1, "sha256": "", "offset": 0}]),
     ("parts", [{"name": "f", "length": 10**40, "sha256": "", "offset": 0}])],
)  # fmt: skip
def test_a_head_with_an_impossible_field_is_bad_payload(field: str, value: object) -> None:
    raw = json.loads(reply_to_bytes(ReplyHeader("a", UpdateId("r", "d", 1), 0, 5)))
    raw[field] = value
    with pytest.raises(BadPayload):
        reply_from_bytes(json.dumps(raw).encode())


def test_an_oversized_head_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadPayload, match="bytes"):
        reply_from_bytes(b"[" * (MAX_HEAD_BYTES + 1))


def test_a_reply_with_a_key_that_nobody_asked_for_is_refused() -> None:
    raw = json.loads(reply_to_bytes(ReplyHeader("a", UpdateId("r", "d", 1), 0, 5)))
    with pytest.raises(BadPayload, match="added_later"):
        reply_from_bytes(json.dumps({**raw, "added_later": 1}).encode())


def test_fields_of_a_newer_version_are_ignored() -> None:
    raw = json.loads(ask_to_bytes(Ask("a", "r", "t", "train", "digest")))
    raw["added_later"] = 1
    assert ask_from_bytes(json.dumps(raw).encode()).ask_id == "a"
