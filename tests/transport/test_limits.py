"""What strangers can hold of the device API, as numbers: nothing here opens a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.net import neighbourhood
from thinwire.transport.server.auth import FAILED_JOINS, JoinRateLimiter
from thinwire.transport.server.connections import (
    FORGET_KNOWN_AFTER_S,
    MAX_UNSIGNED,
    MAX_UNSIGNED_OF_ADDRESS,
    RESERVED_FOR_KNOWN,
    Connection,
    KnownAddresses,
    UnauthenticatedConnections,
)


@given(st.lists(st.integers(0, 60), max_size=2000))
def test_no_more_than_the_limits_are_ever_in(moves: list[int]) -> None:
    strangers, held = UnauthenticatedConnections[int](), dict[int, str]()
    for nth, move in enumerate(moves):
        address = f"192.0.2.{move // 2}"
        if move % 5 == 0 and held:
            strangers.remove(oldest := next(iter(held)))
            del held[oldest]
        else:
            held[nth] = address
            if (ended := strangers.add(nth, address, known=move % 3 == 0)) is not None:
                del held[ended]
        assert len(strangers) == len(held) <= MAX_UNSIGNED
        assert list(held.values()).count(address) <= MAX_UNSIGNED_OF_ADDRESS


def test_the_oldest_of_an_address_makes_room_for_its_next() -> None:
    strangers = UnauthenticatedConnections[int]()
    assert [strangers.add(nth, "192.0.2.1") for nth in range(MAX_UNSIGNED_OF_ADDRESS)] == [
        None
    ] * MAX_UNSIGNED_OF_ADDRESS
    assert strangers.add(100, "192.0.2.2") is None
    assert strangers.add(101, "192.0.2.1") == 0
    strangers.remove(1)
    assert strangers.add(102, "192.0.2.1") is None
    assert strangers.refused_connections == 1


def test_newcomers_have_448_places_and_known_addresses_64_more() -> None:
    strangers, new = UnauthenticatedConnections[int](), MAX_UNSIGNED - RESERVED_FOR_KNOWN
    assert [strangers.add(nth, f"192.0.{nth % 20}.1") for nth in range(new)] == [None] * new
    assert strangers.add(1000, "198.51.100.1") == 0
    known = [strangers.add(2000 + nth, f"203.0.113.{nth}", known=True) for nth in range(RESERVED_FOR_KNOWN)]
    assert known == [None] * RESERVED_FOR_KNOWN
    assert len(strangers) == MAX_UNSIGNED
    assert strangers.add(3000, "203.0.113.200", known=True) == 1, "a newcomer makes room, the oldest first"
    assert strangers.add(3001, "198.51.100.2") == 2, "and for a newcomer no known one does"


def test_an_address_is_known_for_thirty_days_and_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownAddresses()
    known.note("2001:db8::1", 1000.0)
    assert known.contains("2001:db8::ffff", 1000.0 + FORGET_KNOWN_AFTER_S - 1)
    assert not known.contains("2001:db8::1", 1000.0 + FORGET_KNOWN_AFTER_S)
    assert not known.contains("2001:db8:0:1::1", 1000.0)
    monkeypatch.setattr("thinwire.transport.server.connections.MAX_KNOWN", 3)
    for nth in range(5):
        known.note(f"192.0.2.{nth}", 2000.0 + nth)
    assert list(known.at) == ["192.0.2.2", "192.0.2.3", "192.0.2.4"]
    again = KnownAddresses.from_bytes(known.to_bytes())
    assert again.at == known.at
    assert not known.changed
    known.note("192.0.2.4", 2010.0)
    assert not known.changed, "its time is written again once a day"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"192.0.2.1": "now"}', b"\xff"])
def test_a_damaged_table_of_addresses_is_said_to_be_one(data: bytes) -> None:
    with pytest.raises(ValueError):
        KnownAddresses.from_bytes(data)


def test_a_machine_with_a_whole_ipv6_network_is_one_neighbour() -> None:
    assert neighbourhood("2001:db8::1") == neighbourhood("2001:db8::ffff:2") != neighbourhood("2001:db8:0:1::1")
    assert neighbourhood("fe80::1%eth0") == "fe80::/64"
    assert neighbourhood("no address") == "no address"


def test_ten_failed_joins_a_minute_and_address() -> None:
    joins = JoinRateLimiter()
    for second in range(FAILED_JOINS):
        assert joins.wait_s("192.0.2.1", float(second)) == 0.0
        joins.failed("192.0.2.1", float(second))
    assert joins.wait_s("192.0.2.1", 10.0) == 50.0
    assert joins.wait_s("192.0.2.2", 10.0) == 0.0
    assert joins.wait_s("192.0.2.1", 60.0) == 0.0
    joins.failed("192.0.2.1", 60.0)
    assert joins.wait_s("192.0.2.1", 60.5) == 1.0


def test_a_stranger_has_thirty_seconds_and_a_header_ten() -> None:
    wire = Connection(opened_at=100.0, header_since=100.0)
    assert not wire.too_slow(110.0)
    assert wire.too_slow(110.1)
    wire.header_since = None
    assert not wire.too_slow(130.0)
    assert wire.too_slow(130.1)
    wire.signed = True
    assert not wire.too_slow(10_000.0)


def test_a_body_has_a_speed_and_no_total_time() -> None:
    wire = Connection(signed=True, body_since=0.0)
    for minute in range(1, 600):
        wire.body_bytes += 1024 * 31
        assert not wire.too_slow(minute * 30.0)
    wire.body_bytes += 1024 * 29
    assert wire.too_slow(600 * 30.0)
