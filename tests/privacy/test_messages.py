"""The messages of secure aggregation: what is read is what was written, and hostile bytes raise `BadMessage` alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.phase_messages import CLIENTS, advertised, messages
from thinwire.privacy.contexts import context_of_round, digest
from thinwire.privacy.messages import (
    Agreements,
    BadMessage,
    Disclosure,
    Roster,
    Survivors,
    max_bytes,
)

TYPES = list(messages(post_quantum=False))
SUITES = pytest.mark.parametrize("post_quantum", [False, True], ids=["classical", "post-quantum"])


@SUITES
@pytest.mark.parametrize("kind", TYPES)
def test_what_was_written_is_read(kind, post_quantum):
    message, read = messages(post_quantum)[kind]
    assert read(message.write()) == message


@SUITES
@pytest.mark.parametrize("kind", TYPES)
def test_a_message_that_is_cut_or_goes_on_is_refused(kind, post_quantum):
    message, read = messages(post_quantum)[kind]
    raw = message.write()
    for length in [*range(min(len(raw), 200)), *range(200, len(raw), 97)]:
        with pytest.raises(BadMessage):
            read(raw[:length])
    with pytest.raises(BadMessage):
        read(raw + b"\0")


@pytest.mark.parametrize("kind", TYPES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_hostile_bytes_are_refused_or_are_the_bytes_of_what_is_read(kind, data):
    message, read = messages(post_quantum=False)[kind]
    raw = bytearray(message.write())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(raw))
    except BadMessage:
        return
    assert found.write() == raw


@pytest.mark.parametrize("kind", TYPES)
@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=400))
def test_random_bytes_are_refused_or_are_the_bytes_of_what_is_read(kind, raw):
    _, read = messages(post_quantum=False)[kind]
    try:
        found = read(raw)
    except BadMessage:
        return
    assert found.write() == raw


@pytest.mark.parametrize("kind", ["advertisement", "roster", "shares", "delivery"])
def test_a_message_of_the_other_suite_is_refused(kind):
    for post_quantum in (False, True):
        message, _ = messages(post_quantum)[kind]
        with pytest.raises(BadMessage):
            messages(not post_quantum)[kind][1](message.write())


@pytest.mark.parametrize(
    "message",
    [
        Roster((advertised("b", False), advertised("a", False))),
        Roster((advertised("a", False), advertised("a", False))),
        Roster((advertised("A", False),)),
    ],
)
def test_a_roster_has_sorted_distinct_valid_names(message):
    with pytest.raises(BadMessage):
        Roster.read(message.write(), post_quantum=False)


@pytest.mark.parametrize("clients", [(0,), (2, 1), (1, 1), (5,), (1, 2, 3, 4, 5)])
def test_a_list_of_clients_rises_within_the_round(clients):
    with pytest.raises(BadMessage):
        Survivors.read(Survivors(clients).write(), CLIENTS)


def test_a_list_that_claims_many_entries_allocates_nothing():
    for read in (
        lambda raw: Survivors.read(raw, 0xFFFF),
        lambda raw: Disclosure.read(raw, 0xFFFF),
        lambda raw: Agreements.read(raw, 0xFFFF),
        lambda raw: Roster.read(raw, False),
    ):
        with pytest.raises(BadMessage, match="too short"):
            read(b"\xff\xff")


@SUITES
def test_no_message_of_a_client_is_longer_than_its_limit(post_quantum):
    sizes = {kind: len(message.write()) for kind, (message, _) in messages(post_quantum).items()}
    assert sizes["advertisement"] <= max_bytes("advertise", CLIENTS, post_quantum)
    assert sizes["shares"] <= max_bytes("share", CLIENTS, post_quantum)
    assert sizes["disclosure"] <= max_bytes("unmask", CLIENTS, post_quantum)


def test_contexts_differ_in_every_fact():
    facts: dict[str, Any] = {"plan": b"1", "round": 1, "run": "a"}
    made = {context_of_round("suite", facts), context_of_round("other", facts)}
    for name, value in (("plan", b"2"), ("round", 2), ("run", "b"), ("round", "1"), ("more", b"")):
        made.add(context_of_round("suite", facts | {name: value}))
    assert len(made) == 7
    assert digest("a", b"b", b"") != digest("a", b"", b"b")
