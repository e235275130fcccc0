from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import text

from thinwire.core.clock import VirtualClock
from thinwire.store import Store


def test_a_code_opens_one_session_once(store: Store) -> None:
    code = store.logins.new_code()
    token = store.logins.redeem(code)
    assert token is not None
    assert store.logins.valid(token)
    assert store.logins.redeem(code) is None


def test_a_code_can_be_typed_in_any_way(store: Store) -> None:
    assert store.logins.redeem(" " + store.logins.new_code().replace("-", " ").lower()) is not None


def test_a_wrong_code_opens_nothing_and_costs_nothing(store: Store) -> None:
    code = store.logins.new_code()
    for wrong in ("", code[:-1], code + "X", "\ud800", "AAAA-AAAA-AAAA-AAAA"):
        assert store.logins.redeem(wrong) is None
    assert store.logins.redeem(code) is not None


def test_of_many_who_try_at_once_one_gets_in(store: Store) -> None:
    code = store.logins.new_code()
    with ThreadPoolExecutor(8) as threads:
        tokens = list(threads.map(store.logins.redeem, [code] * 8))
    assert sum(token is not None for token in tokens) == 1


def test_a_code_is_valid_for_its_time(store: Store, clock: VirtualClock) -> None:
    short, longer = store.logins.new_code(valid_s=10), store.logins.new_code(valid_s=100)
    clock.advance(10.0)
    assert store.logins.redeem(short) is None
    assert store.logins.redeem(longer) is not None


def test_a_session_ends_when_it_is_ended_or_a_week_is_over(store: Store, clock: VirtualClock) -> None:
    first, second = store.logins.redeem(store.logins.new_code()), store.logins.redeem(store.logins.new_code())
    assert first is not None
    assert second is not None
    store.logins.end(first)
    assert [store.logins.valid(first), store.logins.valid(second), store.logins.valid("")] == [False, True, False]
    clock.advance(7 * 24 * 3600)
    assert not store.logins.valid(second)


def test_the_database_holds_neither_codes_nor_tokens(store: Store) -> None:
    code = store.logins.new_code()
    token = store.logins.redeem(code) or ""
    with store._database.reading() as connection:
        held = str([connection.execute(text(f"SELECT * FROM {table}")).all() for table in ("logins", "sessions")])
    assert code not in held
    assert code.replace("-", "") not in held
    assert token not in held
