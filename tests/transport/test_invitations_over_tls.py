"""Invitations at a TLS device API: each lets one key in, once, and those that are of no use look alike from outside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.callers import PATIENCE_S, Caller, Said, TlsPlace, joined, tls_place
from thinwire.core.clock import RealClock
from thinwire.transport.protocol.http import JOIN, pack

FAR_OFF = 10 * 24 * 3600.0


@dataclass
class Aside(RealClock):
    """This machine's clock, but for what tests add to the date."""

    aside_s: float = 0.0

    def wall(self) -> float:
        return time.time() + self.aside_s


@pytest.fixture
def clock() -> Aside:
    return Aside()


@pytest.fixture
def here(tmp_path: Path, clock: Aside) -> Iterator[TlsPlace]:
    with tls_place(tmp_path, clock=clock, grace_s=PATIENCE_S) as made:  # a caller between two connections has not left
        yield made


def test_invitations_that_are_of_no_use_look_alike_from_outside(here: TlsPlace, clock: Aside) -> None:
    used, withdrawn, expired = here.invited(), here.invited(), here.invited(expires_s=60)
    assert Caller(here, "pi-0").join(used).status == 200
    here.store.invitations.withdraw(2)
    clock.aside_s = FAR_OFF
    answers: dict[str, Said] = {}
    for which, secret in {"used": used, "withdrawn": withdrawn, "expired": expired, "unknown": "0" * 32}.items():
        answers[which] = Caller(here, "pi-1", now=clock.wall).join(secret)
    looks = [answer.looks for answer in answers.values()]
    assert [answers["used"].looks] * 4 == looks
    assert answers["used"].short == (403, "invitation")
    assert sorted(note.why.partition(" ")[0] for note in here.store.audit.notes()) == [
        "expired", "unknown", "used", "withdrawn",
    ]  # fmt: skip
    assert [row.name for row in here.store.roster.rows()] == ["pi-0"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"nothing", b'{"secret": 1, "name": "pi-1"}', b"[" * 3000])
def test_what_is_no_invitation_at_all_looks_so_too(here: TlsPlace, body: bytes) -> None:
    caller = Caller(here)
    assert caller.call("POST", JOIN, pack(body)).short == (403, "invitation")


def test_a_name_that_is_taken_uses_nothing_up(here: TlsPlace) -> None:
    joined(here, "pi-1")
    secret = here.invited()
    newcomer = Caller(here, "pi-1")
    assert newcomer.join(secret).short == (409, "name")
    assert newcomer.join(secret, "Pi/1").short == (409, "name")
    assert newcomer.join(secret, "pi-2").status == 200
    assert [row.name for row in here.store.roster.rows()] == ["pi-1", "pi-2"]


def test_who_has_no_invitation_does_not_learn_which_names_are_taken(here: TlsPlace) -> None:
    joined(here, "pi-1")
    assert Caller(here, "pi-1").join("0" * 32).looks == Caller(here, "pi-9").join("0" * 32).looks


def test_the_eleventh_failed_join_in_a_minute_waits_and_other_addresses_do_not(here: TlsPlace) -> None:
    caller, secret = Caller(here, source="127.3.2.1"), here.invited()
    assert [caller.join("0" * 32).short for _ in range(10)] == [(403, "invitation")] * 10
    refused = caller.join(secret)
    assert refused.short == (429, "joins")
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert Caller(here, source="127.3.2.2").join(secret).status == 200


def test_fifty_that_join_at_once_by_one_invitation_are_one(here: TlsPlace) -> None:
    """Ten from each address: so many may fail there."""
    secret = here.invited()
    callers = [Caller(here, f"pi-{i}", source=f"127.4.0.{1 + i % 5}") for i in range(50)]
    with ThreadPoolExecutor(50) as threads:
        got = list(threads.map(lambda caller: caller.join(secret), callers))
    assert sorted(each.short for each in got) == [(200, "")] + [(403, "invitation")] * 49
    (row,), (invitation,) = here.store.roster.rows(), here.store.invitations.all()
    assert (invitation.state, invitation.used_by) == ("used", row.name)
    assert [each.told["name"] for each in got if each.status == 200] == [row.name]


def test_fifty_joins_at_once_of_one_device_that_hears_no_answer_are_one(here: TlsPlace) -> None:
    secret, key = here.invited(), ec.generate_private_key(ec.SECP384R1())
    callers = [Caller(here, "pi-1", key, source=f"127.5.0.{1 + i % 5}") for i in range(50)]
    with ThreadPoolExecutor(50) as threads:
        got = list(threads.map(lambda caller: caller.join(secret), callers))
    assert {each.short for each in got} == {(200, "")}
    assert len({each.body for each in got}) == 1, "each is answered as the first was"
    (row,), (invitation,) = here.store.roster.rows(), here.store.invitations.all()
    assert (row.name, row.state, invitation.used_by) == ("pi-1", "approved", "pi-1")
