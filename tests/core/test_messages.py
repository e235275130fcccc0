"""Assignments and replies travel as JSON and come back equal; whatever else arrives is BadPayload."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.errors import BadPayload
from thinwire.core.serialization import (
    MAX_HEADER_BYTES,
    MAX_METRICS,
    assignment_from_bytes,
    assignment_to_bytes,
    reply_from_bytes,
    reply_to_bytes,
)
from thinwire.core.types import (
    Assignment,
    Failure,
    Part,
    PhaseReply,
    ReplyHeader,
    SecureWork,
    Timings,
    Transfer,
    UpdateId,
    UpdateOutcome,
    Work,
    assignment_round,
    phase_id,
    phase_of,
    training_id,
)

names = st.from_regex(r"[a-z0-9-]{1,12}", fullmatch=True)
int64 = st.integers(-(2**63) + 1, 2**63 - 1)
positive = st.floats(0, 1e30)
update_ids = st.builds(UpdateId, names, names, st.integers(0, 2**40))
parts = st.builds(Part, names, st.integers(0, 2**40), names)
outcomes = st.builds(
    UpdateOutcome, update_ids, st.sampled_from(["aggregated", "dropped", "unknown"]), st.integers(-1, 99)
)
assignments = st.builds(
    Assignment,
    assignment_id=names, run=names, task=names, kind=st.sampled_from(["train", "evaluate", "stop"]),
    plan=st.one_of(names, st.dictionaries(names, st.integers())), round=st.integers(0, 10**6),
    work=st.builds(Work, st.integers(0, 100), st.integers(1, 100)), deadline_s=positive,
    parts=st.lists(parts, max_size=3).map(tuple),
    outcomes=st.lists(outcomes, max_size=3).map(tuple),
    secure=st.none() | st.builds(SecureWork, st.integers(0, 100), st.integers(0, 9), st.floats(1e-9, 1e9)),
)  # fmt: skip
headers = st.builds(
    ReplyHeader,
    assignment_id=names, update_id=update_ids, base_version=st.integers(0, 99), examples=st.integers(0, 10**9),
    steps=st.integers(0, 10**6), a=st.floats(0, 1e9), norm=positive,
    metrics=st.dictionaries(names, st.tuples(st.floats(-1e99, 1e99), st.just(0.0) | st.floats(1e-9, 1e30)), max_size=3),
    timings=st.builds(Timings, *[st.floats(0, 1e9)] * 5),
    parts=st.lists(parts, max_size=3).map(tuple), counters=st.dictionaries(names, int64, max_size=2),
    residual_norm=positive, lost=st.sampled_from(["", "older"]),
    transfer=st.none() | st.builds(Transfer, positive, positive, positive, st.none() | int64, int64),
)  # fmt: skip


@pytest.mark.parametrize("said", [1, "true", "", None, []])
def test_a_follow_up_is_true_or_false_and_only_said_where_it_is_one(said: object) -> None:
    raw = json.loads(assignment_to_bytes(Assignment("a", "r", "t", "train", "digest")))
    assert "is_follow_up" not in raw
    with pytest.raises(BadPayload):
        assignment_from_bytes(json.dumps({**raw, "is_follow_up": said}).encode())
    assert assignment_from_bytes(json.dumps({**raw, "is_follow_up": True}).encode()).is_follow_up


@given(assignments)
def test_an_assignment_comes_back_equal(assignment: Assignment) -> None:
    assert assignment_from_bytes(assignment_to_bytes(assignment)) == assignment


@given(headers)
def test_a_reply_head_comes_back_equal(header: ReplyHeader) -> None:
    assert reply_from_bytes(reply_to_bytes(header)) == header


@given(names, names)
def test_a_failure_comes_back_equal(kind: str, assignment_id: str) -> None:
    failure = Failure(kind, "in task.py:3", assignment_id, device="pi-03", identity=kind)
    assert reply_from_bytes(reply_to_bytes(failure)) == failure


@given(names, st.binary(max_size=99))
def test_a_message_of_a_phase_comes_back_equal(assignment_id: str, message: bytes) -> None:
    reply = PhaseReply(assignment_id, base64.b64encode(message).decode(), device="pi-03", identity="abc")
    assert reply_from_bytes(reply_to_bytes(reply)) == reply


@pytest.mark.parametrize(
    ("field", "value"),
    [("message", "\u00e9"), ("message", None), ("message", 3), ("assignment_id", "a\n"), ("identity", "a" * 2000),
     ("examples", 5), ("norm", 1.0), ("metrics", {"loss": [1, 1]}), ("update_id", "r/d/1")],
)  # fmt: skip
def test_a_message_of_a_phase_carries_nothing_else(field: str, value: object) -> None:
    raw = json.loads(reply_to_bytes(PhaseReply("a", "")))
    with pytest.raises(BadPayload):
        reply_from_bytes(json.dumps({**raw, field: value}).encode())


@pytest.mark.parametrize("secure", [3, {"selected": -1}, {"clip": float("nan")}, {"window": 1.5}])
def test_what_a_secure_round_says_alike_is_checked(secure: object) -> None:
    raw = json.loads(assignment_to_bytes(Assignment("a", "r", "t", "train", "digest")))
    with pytest.raises(BadPayload):
        assignment_from_bytes(json.dumps({**raw, "secure": secure}).encode())


def test_the_id_of_a_phase_names_its_round_and_its_training_assignment() -> None:
    for first in ("digits-3.12.pi-01", "a.b-3.1.pi"):
        later = phase_id(first, "share")
        assert (training_id(later), phase_of(later), phase_of(first)) == (first, "share", "")
        assert assignment_round(later) == assignment_round(first)
    assert training_id("stop") == "stop"


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_arbitrary_bytes_are_bad_payload(data: bytes) -> None:
    for read in (assignment_from_bytes, reply_from_bytes):
        with pytest.raises(BadPayload):
            read(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("a", float("nan")), ("norm", float("inf")), ("examples", -1), ("steps", -3), ("update_id", "x"), ("parts", 3),
     ("metrics", {"loss": [float("nan"), 1]}), ("parts", [{"name": "f", "length": -1, "sha256": "", "offset": 0}]),
     ("parts", [{"name": "f", "length": 1, "sha256": "", "offset": 8}]), ("timings", None),
     ("examples", 1e400), ("examples", 2**41), ("a", 1e10), ("base_version", -1), ("steps", 2**63),
     ("update_id", f"r/d/{2**63}"), ("update_id", "r/d/-1"), ("assignment_id", "a" * 2000), ("assignment_id", "a\n"),
     ("assignment_id", "\ud800"), ("lost", "a\n"), ("timings", {"train_s": float("nan")}),
     ("counters", {"n": 10**30}), ("lost", None),
     ("metrics", {"loss": [1e101, 1]}), ("metrics", {"loss": [1, -1]}), ("metrics", {"loss": [1, 1e-300]}),
     ("metrics", {str(i): [1, 1] for i in range(MAX_METRICS + 1)}), ("metrics", {"\x1b[31m": [1, 1]}),
     ("parts", [{"name": "f" * 2000, "length": 1, "sha256": "", "offset": 0}]),
     ("parts", [{"name": "f", "length": 10**40, "sha256": "", "offset": 0}])],
)  # fmt: skip
def test_a_header_with_an_impossible_field_is_bad_payload(field: str, value: object) -> None:
    raw = json.loads(reply_to_bytes(ReplyHeader("a", UpdateId("r", "d", 1), 0, 5)))
    raw[field] = value
    with pytest.raises(BadPayload):
        reply_from_bytes(json.dumps(raw).encode())


def test_an_oversized_head_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadPayload, match="bytes"):
        reply_from_bytes(b"[" * (MAX_HEADER_BYTES + 1))


def test_a_reply_with_a_key_that_nobody_requested_is_refused() -> None:
    raw = json.loads(reply_to_bytes(ReplyHeader("a", UpdateId("r", "d", 1), 0, 5)))
    with pytest.raises(BadPayload, match="added_later"):
        reply_from_bytes(json.dumps({**raw, "added_later": 1}).encode())


def test_fields_of_a_newer_version_are_ignored() -> None:
    raw = json.loads(assignment_to_bytes(Assignment("a", "r", "t", "train", "digest")))
    raw["added_later"] = 1
    assert assignment_from_bytes(json.dumps(raw).encode()).assignment_id == "a"
