"""Each attack on a secure round is noticed by a client or by the aggregator, or is shown to be harmless.

Those on its roster: test_roster_attacks.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.secure_cohort import Cohort, cohort_at, first, name_of, reason_of, terms_of
from thinwire.core.errors import PlanError
from thinwire.privacy.contexts import SecureTerms
from thinwire.privacy.messages import (
    Agreements,
    BadMessage,
    Delivery,
    Disclosure,
    Survivors,
)
from thinwire.privacy.secure_round import Aborted, TooFew

# Different things told to different clients


def test_different_lists_of_sharers_leave_masks_on_the_sum():
    cohort = cohort_at("masked")
    whole = Delivery.read(cohort.requests[name_of(0)], 1, 5, post_quantum=False)
    fewer = Delivery(whole.sharers[:4], whole.nonces[:4], whole.dealt[:3]).write()
    cohort.requests[name_of(0)] = fewer
    for name, request in cohort.requests.items():
        cohort.answer("masked", name, request)
        cohort.server.receive(name)
    requests = cohort.server.close()
    with pytest.raises(BadMessage, match="another list of survivors, or in another context"):
        cohort.server.receive(name_of(0), cohort.answer("agree", name_of(0), Survivors((1, 2, 3, 4)).write()))
    signed = [(i, cohort.answer("agree", name_of(i - 1), requests[name_of(i - 1)])) for i in (2, 3, 4, 5)]
    for index, message in signed:
        cohort.server.receive(name_of(index - 1), message)
    for name, request in cohort.server.close().items():
        cohort.server.receive(name, cohort.answer("unmask", name, request))
    with pytest.raises(Aborted, match="the masks do not cancel"):
        cohort.sum()


def test_two_lists_of_survivors_never_both_gather_the_signatures():
    cohort = cohort_at("agree")
    lists = {0: (1, 2, 3, 4, 5), 1: (1, 2, 3, 4, 5), 2: (1, 2, 3, 4), 3: (1, 2, 3, 4)}
    signatures = {i: cohort.participants[name_of(i)].agree(Survivors(clients).write()) for i, clients in lists.items()}
    some = Agreements(tuple((i + 1, signature) for i, signature in sorted(signatures.items()))).write()
    assert reason_of(lambda: first(cohort).unmask(some)) == "signature"


# Shares


def with_first(delivery: Delivery, **changed: Any) -> Delivery:
    (dealer, entry), *others = delivery.dealt
    return replace(delivery, dealt=((dealer, replace(entry, **changed)), *others))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: replace(d, nonces=(bytes(32), *d.nonces[1:])),
        lambda d: replace(d, dealt=d.dealt[1:]),
        lambda d: replace(d, sharers=d.sharers[1:], nonces=d.nonces[1:]),
    ],
)
def test_a_delivery_of_other_clients_or_nonces_is_refused(change):
    cohort = cohort_at("masked")
    delivery = change(Delivery.read(cohort.requests[name_of(0)], 1, 5, post_quantum=False))
    assert reason_of(lambda: first(cohort).prepare(delivery.write())) in ("shares", "too-few")


def test_the_messages_of_another_round_are_refused():
    cohort, other = cohort_at("masked"), Cohort(terms_of(5, 3), 5, seed=1)
    other.run(until="share")
    assert reason_of(lambda: first(cohort).prepare(other.requests[name_of(0)])) == "shares"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: with_first(d, sealed=d.dealt[1][1].sealed),
        lambda d: with_first(d, sealed=bytes(82)),
        lambda d: with_first(d, root_commitment=bytes(32)),
        lambda d: with_first(d, self_commitment=bytes(32)),
    ],
)
def test_shares_that_were_swapped_or_changed_are_not_kept(change):
    cohort = cohort_at("masked")
    first(cohort).prepare(change(Delivery.read(cohort.requests[name_of(0)], 1, 5, post_quantum=False)).write())
    assert set(first(cohort)._received_shares) == {1, 3, 4, 5}


def deals_wrong_shares_to(cohort: Cohort, holders: set[int]) -> None:
    liar: Any = cohort.participants[name_of(1)]
    honest = liar._share_commitment
    liar._share_commitment = lambda dealer, holder, kind, share: honest(
        dealer, holder, kind, bytes(33) if holder in holders else share
    )


@pytest.mark.parametrize("lost", [{}, {"masked": [name_of(1)]}])
def test_a_dealer_of_wrong_shares_cannot_drive_honest_clients_out_of_the_sum(lost):
    cohort = Cohort(terms_of(5, 3), 5)
    deals_wrong_shares_to(cohort, {1, 3} if not lost else {1})
    cohort.run(lost)
    assert {name_of(i) for i in (0, 2, 3, 4)} <= set(cohort.server.survivors)
    lanes, _ = cohort.sum()
    assert np.array_equal(lanes, cohort.wanted(cohort.server.survivors)[0])


def test_a_dealer_of_too_many_wrong_shares_is_named():
    cohort = Cohort(terms_of(5, 3), 5)
    deals_wrong_shares_to(cohort, {1, 3, 4})
    with pytest.raises(TooFew, match="2 shares of a secret of client-001"):
        cohort.run()


# Survivors


@pytest.mark.parametrize(
    ("survivors", "expected"), [((2, 3, 4), "survivors"), ((1, 2), "too-few"), ((1, 2, 3, 4, 5, 6), "message")]
)
def test_a_wrong_list_of_survivors_is_not_signed(survivors, expected):
    cohort = cohort_at("agree")
    assert reason_of(lambda: first(cohort).agree(Survivors(survivors).write())) == expected


@pytest.mark.parametrize(("least", "signs"), [(4, True), (5, False)])
def test_an_owner_may_want_more_survivors_than_the_round_needs(least: int, signs: bool):
    cohort = Cohort(terms_of(5, 3), 5)
    cohort.participants[name_of(0)] = cohort.participant(0, min_survivors=least)
    cohort.run(until="masked")
    four = Survivors((1, 2, 3, 4)).write()
    assert first(cohort).agree(four) if signs else reason_of(lambda: first(cohort).agree(four)) == "too-few"


@pytest.mark.parametrize(("corrupt", "members"), [(0.0, 2), (0.5, 6)])
def test_no_sum_has_one_honest_client_only(corrupt, members):
    """The others subtract their own points: of two clients either one, of A + 1 the A corrupt ones together."""
    clients = 4 if members == 2 else 10
    terms = SecureTerms(clients, corrupt, (clients - members - 1) / clients, lanes=21, width=12, scalars=("weight",))
    cohort = Cohort(terms, clients)
    cohort.run(until="masked")
    assert reason_of(lambda: first(cohort).agree(Survivors(tuple(range(1, members + 1))).write())) == "too-few"
    with pytest.raises(PlanError, match="no threshold"):
        SecureTerms(clients, corrupt, (clients - members) / clients, 21, 12).graph_of(clients)


def test_a_survivor_that_sent_no_shares_is_refused():
    cohort = Cohort(terms_of(5, 3), 5)
    cohort.run({"share": [name_of(4)]}, until="masked")
    assert reason_of(lambda: first(cohort).agree(Survivors((1, 2, 3, 5)).write())) == "survivors"


def test_both_shares_of_a_peer_never_leave_one_client():
    cohort = cohort_at("unmask")
    one = first(cohort)
    answer = one.unmask(cohort.requests[name_of(0)])
    assert one.unmask(cohort.requests[name_of(0)]) == answer
    assert [is_root for _, is_root, _ in Disclosure.read(answer, 5).shares] == [False] * 5
    assert reason_of(lambda: one.unmask(cohort.requests[name_of(0)] + b"x")) == "another-request"


def test_a_second_list_of_survivors_withdraws_the_client():
    cohort = cohort_at("agree")
    one = first(cohort)
    one.agree(Survivors((1, 2, 3, 4)).write())
    assert reason_of(lambda: one.agree(Survivors((1, 2, 3)).write())) == "another-request"
    assert reason_of(lambda: one.unmask(Agreements(()).write())) == "order"


def test_a_second_vector_is_never_masked():
    cohort = cohort_at("agree")
    lanes = np.zeros(cohort.terms.lanes, np.uint16)
    assert reason_of(lambda: first(cohort).mask(lanes, [1, 1])) == "order"


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:2],
        lambda rows: tuple((index, rows[0][1]) for index, _ in rows),
        lambda rows: tuple((index, b"") for index, _ in rows),
    ],
)
def test_signatures_that_are_forged_or_repeated_do_not_count(change):
    cohort = cohort_at("unmask")
    rows = change(Agreements.read(cohort.requests[name_of(0)], 5).signatures)
    assert reason_of(lambda: first(cohort).unmask(Agreements(rows).write())) == "signature"


def test_no_share_of_the_own_root_is_kept():
    cohort = cohort_at("agree")
    assert first(cohort)._received_shares[1][0] == b""


# The aggregator


def test_a_client_that_discloses_wrong_shares_is_dropped_and_the_sum_is_exact():
    cohort = cohort_at("unmask")
    for number, (name, request) in enumerate(sorted(cohort.requests.items())):
        answer = cohort.answer("unmask", name, request)
        if number == 0:
            rows = Disclosure.read(answer, 5).shares
            wrong = Disclosure((*rows[:-1], (rows[-1][0], rows[-1][1], bytes(33)))).write()
            with pytest.raises(BadMessage, match="client-004 did not deal"):
                cohort.server.receive(name, wrong)
        else:
            cohort.server.receive(name, answer)
    cohort.server.close()
    lanes, _ = cohort.sum()
    assert np.array_equal(lanes, cohort.wanted(cohort.server.survivors)[0])


def test_a_client_that_discloses_the_other_share_is_dropped():
    cohort = cohort_at("unmask")
    answer = cohort.answer("unmask", name_of(0), cohort.requests[name_of(0)])
    rows = Disclosure.read(answer, 5).shares
    with pytest.raises(BadMessage, match="of the other kind"):
        cohort.server.receive(name_of(0), Disclosure(tuple((d, not root, s) for d, root, s in rows)).write())


def test_a_withdrawn_client_keeps_no_secret():
    cohort = cohort_at("masked")
    one = first(cohort)
    reason_of(lambda: one.prepare(b""))
    assert not {"_root", "_self_seed", "_seal_keys", "_mask_keys", "_nonce"} & set(vars(one))
    assert not one._received_shares


def test_the_sum_holds_a_client_that_answered_nothing_after_its_vector():
    cohort = cohort_at("agree")
    for name in map(name_of, range(1, 5)):
        cohort.server.receive(name, cohort.answer("agree", name, cohort.requests[name]))
    for name, request in cohort.server.close().items():
        cohort.server.receive(name, cohort.answer("unmask", name, request))
    lanes, _ = cohort.sum()
    assert np.array_equal(lanes, cohort.wanted(list(map(name_of, range(5))))[0])
    assert first(cohort).state == "masked"
