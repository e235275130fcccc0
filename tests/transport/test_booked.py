"""A device reports its own privacy ledger at each registration, so that an aggregator notices a lost ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fleet_words import hello, polled, pulled
from tests.support.transport_doubles import place
from thinwire.core.errors import BadPayload, Refused, ThinwireError
from thinwire.core.fleet import MAX_EARLIER_KEYS, MAX_POPULATIONS, MAX_RELEASES, ClientConnected, Envelope, Hello
from thinwire.core.types import Assignment
from thinwire.transport.protocol import registration

WARD, HEAD = "ab" * 8, "cd" * 32


def test_a_hello_carries_the_ledger_and_one_without_it_has_no_word_of_it() -> None:
    said = replace(hello("pi-1"), booked={WARD: 7}, booked_head=HEAD, booked_keys=("ef" * 32,))
    assert registration.hello_from_bytes(registration.to_bytes(said)) == said
    plain = registration.to_bytes(hello("pi-1"))
    assert b"booked" not in plain  # an older aggregator gets the hello that it knows
    assert registration.hello_from_bytes(plain).booked == {}


def test_what_a_stranger_reports_of_its_ledger_is_bounded() -> None:
    many = {f"{number:016x}": number for number in range(MAX_POPULATIONS)}
    raw = json.loads(registration.to_bytes(replace(hello("pi-1"), booked=many, booked_head="f" * 9999)))
    raw["booked_keys"] = ["e" * 999] * MAX_EARLIER_KEYS
    said = registration.hello_from_bytes(json.dumps(raw).encode())
    assert (said.booked, len(said.booked_head)) == (many, 64)
    assert (len(said.booked_keys), len(said.booked_keys[0])) == (MAX_EARLIER_KEYS, 64)
    for more in ({"booked": many | {WARD: 1}}, {"booked_keys": ["e"] * (MAX_EARLIER_KEYS + 1)}):
        with pytest.raises(BadPayload, match=r"and may report (1024|64) ") as found:
            registration.hello_from_bytes(json.dumps(raw | more).encode())
        assert found.value.why
        assert found.value.hint
    for wrong in (
        {WARD: -1},
        {WARD: 1e300},
        {WARD: MAX_RELEASES + 1},
        {WARD: "many"},
        {WARD: None},
        [WARD],
        {WARD: float("nan")},
    ):
        with pytest.raises(BadPayload):
            registration.hello_from_bytes(json.dumps(raw | {"booked": wrong}).encode())


def test_a_report_that_the_aggregator_cannot_take_is_refused_with_what_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"{number:016x}": 1 for number in range(MAX_POPULATIONS + 1)}
    with place(tmp_path) as here:
        with pytest.raises(ThinwireError) as found:
            here.link("pi-1", booked=lambda: (many, HEAD, ())).hello(hello("pi-1"))
        assert all(
            words in str(found.value)
            for words in ("its privacy ledger", "may report 1024", "too little privacy", "another device")
        )
        assert here.roster.hellos == []

        def refuse(said: Hello, at: float) -> None:
            raise Refused("pi-1 has reported 1025 populations", "it made some up", "thinwire devices revoke pi-1")

        monkeypatch.setattr(here.roster, "seen", refuse)
        with pytest.raises(ThinwireError) as found:
            here.link("pi-1").hello(hello("pi-1"))
        assert all(words in str(found.value) for words in ("1025 populations", "it made some up", "devices revoke"))
        assert here.fleet.poll(0.0) == [], "no run selects a device that was refused"


def test_each_registration_reports_the_ledger_as_it_is_then(tmp_path: Path) -> None:
    """Also one that the link makes by itself: the aggregator that restarted may be restored from a backup."""
    booked = {WARD: 1}
    with place(tmp_path) as here:
        link = here.link("pi-1", booked=lambda: (dict(booked), HEAD, ("ef" * 32,)))
        link.hello(hello("pi-1"))
        assert (here.roster.hellos[-1].booked, here.roster.hellos[-1].booked_keys) == ({WARD: 1}, ("ef" * 32,))
        polled(here.fleet, ClientConnected)
        booked[WARD] = 5
        here.restart()
        here.fleet.send([Envelope("pi-1", Assignment("toy-1.1.pi-1", "toy-1", "toy", "train", "", round=1))])
        pulled(link)
        assert (here.roster.hellos[-1].booked, here.roster.hellos[-1].booked_head) == ({WARD: 5}, HEAD)
