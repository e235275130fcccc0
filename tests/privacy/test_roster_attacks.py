"""Each attack with the keys or the roster of a secure round is refused, or is shown to be harmless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.secure_cohort import Cohort, cohort_at, first, identity, name_of, reason_of, terms_of
from thinwire.privacy.contexts import context_of_round
from thinwire.privacy.messages import (
    Advertisement,
    BadMessage,
    Delivery,
    Roster,
    Shares,
)

LOW_ORDER = (
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
)


def test_a_client_of_another_plan_or_model_is_refused_by_all():
    cohort = Cohort(terms_of(5, 3), 5)
    cohort.participants[name_of(1)] = cohort.participant(1, context0=context_of_round("test", {"round": 1}))
    with pytest.raises(BadMessage, match="not signed for this round"):
        cohort.run()
    ours = Cohort(terms_of(5, 3), 5)
    made = [one.advertise() for one in ours.participants.values()]
    made[1] = cohort.participants[name_of(1)].advertise()
    roster = Roster(tuple(Advertisement.read(raw, post_quantum=False) for raw in made)).write()
    assert reason_of(lambda: first(ours).share(roster)) == "signature"


@pytest.mark.parametrize(
    "other", [{"min_survivors": 4}, {"max_corrupt": 0.01}, {"selected": 6}, {"scalars": ("weight", "loss")}]
)
def test_a_client_of_other_terms_is_refused_whatever_the_caller_put_into_the_context(other):
    cohort = Cohort(terms_of(5, 3), 5)
    plain = cohort.terms
    cohort.terms = replace(plain, **other)
    cohort.participants[name_of(1)] = cohort.participant(1)
    with pytest.raises(BadMessage, match="not signed for this round"):
        cohort.run()


def test_a_second_device_with_one_identity_key_drops_out_alone():
    """Otherwise the clients would refuse the roster, and one owner of two names could end every round."""
    cohort = Cohort(terms_of(5, 3), 5)
    cohort.server._identities[name_of(1)] = identity(0)
    sybil: Any = cohort.participants[name_of(1)]
    sybil._advertisement, sybil._identity = replace(sybil._advertisement, identity=identity(0)), first(cohort)._identity
    cohort.server.receive(name_of(0), first(cohort).advertise())
    with pytest.raises(BadMessage, match="the identity key of another client"):
        cohort.server.receive(name_of(1), sybil.advertise())


@pytest.mark.parametrize("taken", ["enc", "mask", "own"])
def test_a_key_of_another_client_and_one_key_for_two_purposes_are_refused_by_the_aggregator(taken):
    cohort = Cohort(terms_of(5, 3), 5)
    liar: Any = cohort.participants[name_of(1)]
    victim = first(cohort)._advertisement
    keys = {"enc": {"enc": victim.enc}, "mask": {"enc": victim.mask}, "own": {"mask": liar._advertisement.enc}}[taken]
    liar._advertisement = replace(liar._advertisement, **keys)
    cohort.server.receive(name_of(0), first(cohort).advertise())
    with pytest.raises(BadMessage, match="a key of another client, or one key for two purposes"):
        cohort.server.receive(name_of(1), liar.advertise())


def test_a_roster_that_is_too_long_is_refused_before_a_signature_is_checked(monkeypatch):
    cohort = cohort_at("share")
    clients = Roster.read(cohort.requests[name_of(0)], post_quantum=False).clients
    many = Roster((*clients, *(replace(clients[0], name=f"sybil-{i:05}") for i in range(60_000)))).write()
    monkeypatch.setattr("thinwire.privacy.participant.signed_by", lambda *_: pytest.fail("a signature was checked"))
    assert reason_of(lambda: first(cohort).share(many)) == "too-few"


def test_different_rosters_give_shares_that_nobody_opens():
    cohort = Cohort(terms_of(5, 3), 5)
    cohort.run(until="advertise")
    clients = Roster.read(cohort.requests[name_of(0)], post_quantum=False).clients
    smaller = Roster(clients[:4]).write()
    shares = [
        cohort.participants[name_of(i)].share(smaller if i == 0 else cohort.requests[name_of(i)]) for i in range(5)
    ]
    dealt = Shares.read(shares[0], 1, [1, 2, 3, 4], post_quantum=False)
    for i in range(1, 5):
        cohort.server.receive(name_of(i), shares[i])
    delivery = Delivery.read(cohort.server.close()[name_of(1)], 2, 5, post_quantum=False)
    entry = next(one for one in dealt.holders if one.holder == 2)
    forged = Delivery((1, *delivery.sharers), (dealt.nonce, *delivery.nonces), ((1, entry), *delivery.dealt)).write()
    told: Any = cohort.participants[name_of(1)]
    told.prepare(forged)
    assert set(told._received_shares) == {2, 3, 4, 5}, "it discloses nothing of the client with another roster"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: (replace(c[0], process=b"x" * 16), *c[1:]), "roster"),
        (lambda c: c[1:], "roster"),
        (lambda c: c[:2], "too-few"),
        (lambda c: (c[0], replace(c[1], enc=c[2].enc), *c[2:]), "roster"),
        (lambda c: (c[0], replace(c[1], mask=c[1].enc), *c[2:]), "roster"),
        (lambda c: (c[0], replace(c[1], identity=c[2].identity), *c[2:]), "roster"),
        (lambda c: (c[0], replace(c[1], nonce_commitment=bytes(32)), *c[2:]), "signature"),
        (lambda c: (c[0], replace(c[1], signature=c[2].signature), *c[2:]), "signature"),
        (lambda c: (*c[:4], replace(c[4], name="client-9")), "signature"),
    ],
)
def test_a_wrong_roster_is_refused_before_a_share_is_made(change, expected):
    cohort = cohort_at("share")
    clients = Roster.read(cohort.requests[name_of(0)], post_quantum=False).clients
    assert reason_of(lambda: first(cohort).share(Roster(change(clients)).write())) == expected
    assert reason_of(lambda: first(cohort).share(cohort.requests[name_of(0)])) == "order"


def test_more_clients_than_were_asked_are_refused():
    cohort = Cohort(terms_of(4, 3), 5)
    made = [one.advertise() for one in cohort.participants.values()]
    roster = Roster(tuple(Advertisement.read(raw, post_quantum=False) for raw in made)).write()
    assert reason_of(lambda: first(cohort).share(roster)) == "too-few"


def test_a_sybil_outside_the_pinned_roster_is_refused():
    cohort = Cohort(terms_of(5, 4, adversary="malicious"), 5, pinned={name_of(i): identity(i) for i in range(4)})
    cohort.run(until="advertise")
    assert reason_of(lambda: first(cohort).share(cohort.requests[name_of(0)])) == "roster"


def test_a_malicious_aggregator_is_withstood_only_with_a_pinned_roster():
    assert reason_of(lambda: Cohort(terms_of(5, 4, adversary="malicious"), 5)) == "terms"


def test_a_pinned_roster_and_malicious_terms_sum_exactly():
    cohort = Cohort(terms_of(5, 4, adversary="malicious"), 5, pinned={name_of(i): identity(i) for i in range(5)})
    cohort.run({"masked": [name_of(4)]})
    lanes, _ = cohort.sum()
    assert np.array_equal(lanes, cohort.wanted(cohort.server.survivors)[0])


@pytest.mark.parametrize("point", LOW_ORDER)
@pytest.mark.parametrize("pair", ["enc", "mask"])
def test_a_point_of_low_order_is_refused(point, pair):
    cohort = Cohort(terms_of(5, 3), 5)
    other: Any = cohort.participants[name_of(1)]
    keys = replace(getattr(other._advertisement, pair), x25519=point)
    other._advertisement = replace(other._advertisement, **{pair: keys})
    made = [one.advertise() for one in cohort.participants.values()]
    with pytest.raises(BadMessage, match="low order"):
        cohort.server.receive(name_of(1), made[1])
    roster = Roster(tuple(Advertisement.read(raw, post_quantum=False) for raw in made)).write()
    assert reason_of(lambda: first(cohort).share(roster)) == "roster"
