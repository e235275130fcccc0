"""What strangers can hold of the door, as numbers: nothing here opens a socket."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.flower.door.account import Wire
from thinwire.flower.door.limits import (
    FAILED_JOINS,
    UNSIGNED_OF_ALL,
    UNSIGNED_OF_ONE,
    FailedJoins,
    Strangers,
    neighbourhood,
)


@given(st.lists(st.integers(0, 60), max_size=2000))
def test_no_more_than_the_limits_are_ever_in(moves: list[int]) -> None:
    strangers, held = Strangers(), list[str]()
    for move in moves:
        address = f"192.0.2.{move // 2}"
        if move % 5 == 0 and held:
            strangers.gone(held.pop())
        elif strangers.admit(address):
            held.append(address)
        assert len(strangers) == len(held) <= UNSIGNED_OF_ALL
        assert held.count(address) <= UNSIGNED_OF_ONE


def test_who_is_one_too_many_is_turned_away_until_one_goes() -> None:
    strangers = Strangers()
    assert [strangers.admit("192.0.2.1") for _ in range(UNSIGNED_OF_ONE + 1)] == [True] * UNSIGNED_OF_ONE + [False]
    assert strangers.admit("192.0.2.2")
    strangers.gone("192.0.2.1")
    assert strangers.admit("192.0.2.1")
    assert strangers.turned_away == 1


def test_all_together_are_512() -> None:
    strangers = Strangers()
    got = [strangers.admit(f"192.0.{net}.{host}") for net in range(20) for host in range(UNSIGNED_OF_ONE)]
    assert sum(got) == UNSIGNED_OF_ALL


def test_a_machine_with_a_whole_ipv6_network_is_one_neighbour() -> None:
    assert neighbourhood("2001:db8::1") == neighbourhood("2001:db8::ffff:2") != neighbourhood("2001:db8:0:1::1")
    assert neighbourhood("fe80::1%eth0") == "fe80::/64"
    assert neighbourhood("no address") == "no address"


def test_ten_failed_joins_a_minute_and_address() -> None:
    joins = FailedJoins()
    for second in range(FAILED_JOINS):
        assert joins.wait_s("192.0.2.1", float(second)) == 0.0
        joins.failed("192.0.2.1", float(second))
    assert joins.wait_s("192.0.2.1", 10.0) == 50.0
    assert joins.wait_s("192.0.2.2", 10.0) == 0.0
    assert joins.wait_s("192.0.2.1", 60.0) == 0.0
    joins.failed("192.0.2.1", 60.0)
    assert joins.wait_s("192.0.2.1", 60.5) == 1.0


def test_a_stranger_has_thirty_seconds_and_a_head_ten() -> None:
    wire = Wire(opened_at=100.0, head_since=100.0)
    assert not wire.too_slow(110.0)
    assert wire.too_slow(110.1)
    wire.head_since = None
    assert not wire.too_slow(130.0)
    assert wire.too_slow(130.1)
    wire.signed = True
    assert not wire.too_slow(10_000.0)


def test_a_body_has_a_speed_and_no_total_time() -> None:
    wire = Wire(signed=True, body_since=0.0)
    for minute in range(1, 600):
        wire.body_bytes += 1024 * 31
        assert not wire.too_slow(minute * 30.0)
    wire.body_bytes += 1024 * 29
    assert wire.too_slow(600 * 30.0)
