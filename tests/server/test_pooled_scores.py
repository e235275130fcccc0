"""The sum of the clients' histograms: what is pooled, what one client can move, and what the wire carries."""

from __future__ import annotations

import json

import pytest

from thinwire.core.errors import BadPayload
from thinwire.core.protocol import reply_digest, without_facts
from thinwire.core.score_histogram import pooled_scores
from thinwire.core.serialization import FREE_HEADER_BYTES, reply_from_bytes, reply_to_bytes
from thinwire.core.types import ReplyHeader, UpdateId

GOOD, FALSE = [[9, 1], [1, 9]], [[0, 5000], [5000, 0]]


def test_names_that_few_clients_report_and_other_bins_are_left_out() -> None:
    found = pooled_scores({
        "a": {"sick": GOOD, "mine": GOOD}, "b": {"sick": GOOD}, "c": {"sick": GOOD}, "d": {"sick": [[1] * 4, [1] * 4]},
    })  # fmt: skip
    assert found.plain == {"sick_auc": 0.9, "sick_f1": 0.9}
    assert (found.bounded, found.clipped) == ({}, {})
    assert pooled_scores({"a": {}, "b": {}}).plain == {}


def test_one_client_cannot_decide_by_a_number_of_examples_that_it_made_up() -> None:
    replies = {**{name: {"sick": GOOD} for name in "abcdefgh"}, "liar": {"sick": FALSE}}
    found = pooled_scores(replies, max_weight=1.0)
    assert found.plain["sick_auc"] < 0.1
    assert found.bounded["sick_auc"] > 0.75
    assert found.clipped == {"liar": ["sick_auc", "sick_f1"]}


def test_one_class_alone_has_no_auc() -> None:
    assert pooled_scores({"a": {"sick": [[3, 1], [0, 0]]}}).plain == {"sick_f1": 0.0}
    assert pooled_scores({"a": {"sick": [[3, 0], [0, 0]]}}).plain == {}


def header(**more: object) -> ReplyHeader:
    return ReplyHeader("small-1.1.a", UpdateId("small-1", "a", 1), 0, 8, **more)  # type: ignore[arg-type]


def test_a_reply_carries_them_and_a_protected_one_none() -> None:
    most = {str(n): [[10**8] * 512, [10**8] * 512] for n in range(4)}
    raw = reply_to_bytes(header(histograms=most))
    assert len(raw) < FREE_HEADER_BYTES
    assert reply_from_bytes(raw, FREE_HEADER_BYTES) == header(histograms=most)
    assert b"histograms" not in reply_to_bytes(header())
    assert reply_digest(header()) != reply_digest(header(histograms={"sick": GOOD}))
    assert without_facts(header(histograms={"sick": GOOD})).histograms == {}


def test_a_reply_beyond_the_bounds_is_refused() -> None:
    raw = json.loads(reply_to_bytes(header()))
    with pytest.raises(BadPayload, match="histogram"):
        reply_from_bytes(json.dumps(raw | {"histograms": {"sick": [[1, -1], [0, 0]]}}).encode())
