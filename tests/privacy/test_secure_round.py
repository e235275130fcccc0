"""A secure round ends with the exact sum of the survivors, or with `TooFew` or `Aborted`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.secure_cohort import Cohort, name_of, terms_of
from thinwire.core.types import PHASES
from thinwire.privacy import participant, secure_round
from thinwire.privacy.contexts import SecureTerms, signed_by
from thinwire.privacy.keys import seal
from thinwire.privacy.messages import SECRET_BYTES, BadMessage
from thinwire.privacy.secure_round import Aborted, TooFew


def same(cohort: Cohort) -> None:
    """The unmasked sum is that of the survivors, computed in the clear."""
    lanes, scalars = cohort.sum()
    wanted, wanted_scalars = cohort.wanted(cohort.server.survivors)
    assert np.array_equal(lanes, wanted)
    assert scalars == wanted_scalars


@pytest.mark.parametrize("post_quantum", [False, True])
@pytest.mark.parametrize("width", [12, 20])
def test_the_sum_is_exact_when_everybody_stays(width, post_quantum):
    cohort = Cohort(terms_of(5, 3, width=width, post_quantum=post_quantum), 5)
    cohort.run()
    assert cohort.server.survivors == tuple(map(name_of, range(5)))
    same(cohort)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("post_quantum", [False, True])
def test_one_client_may_be_lost_in_any_phase(phase, post_quantum):
    cohort = Cohort(terms_of(6, 4, post_quantum=post_quantum), 6)
    cohort.run({phase: [name_of(2)]})
    assert cohort.server.dropped == ({} if phase == "unmask" else {name_of(2): phase}), "the others' shares are enough"
    assert (name_of(2) in cohort.server.survivors) == (phase in ("agree", "unmask"))
    same(cohort)


def whoever_leaves(data: st.DataObject, clients: int, seed: int, stays: int) -> None:
    """Clients leave in drawn phases; the sum is that of the survivors, or there is none. `stays` stay where 5 leave."""
    threshold = data.draw(st.integers(min(3, clients // 2 + 1), clients - 1), label="threshold")
    phases = data.draw(st.lists(st.sampled_from([*["stays"] * stays, *PHASES]), min_size=clients, max_size=clients))
    lost = {phase: [name_of(i) for i in range(clients) if phases[i] == phase] for phase in PHASES}
    cohort = Cohort(terms_of(clients, threshold, lanes=9), clients, seed)
    least, alive, ends = cohort.terms.graph_of(clients).min_survivors, clients, False
    for phase in PHASES:
        alive -= len(lost[phase])
        ends = ends or alive < (threshold if phase in ("agree", "unmask") else least)
    if ends:
        with pytest.raises(TooFew):
            cohort.run(lost)
        return
    cohort.run(lost)
    assert cohort.server.can_unmask
    same(cohort)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), clients=st.integers(3, 12), seed=st.integers(0, 1000))
def test_whoever_leaves_the_sum_is_that_of_the_survivors_or_there_is_none(data, clients, seed):
    whoever_leaves(data, clients, seed, stays=8)


@settings(max_examples=4, deadline=None, phases=[Phase.generate])  # to shrink one that fails would take minutes
@given(data=st.data(), clients=st.integers(13, 60), seed=st.integers(0, 1000))
def test_whoever_leaves_a_large_cohort_the_sum_is_that_of_the_survivors_or_there_is_none(data, clients, seed):
    once = cache(signed_by)  # each client checks the same signatures of all others
    with patch.object(participant, "signed_by", once), patch.object(secure_round, "signed_by", once):
        whoever_leaves(data, clients, seed, stays=50)


def test_too_few_clients_reveal_nothing():
    cohort = Cohort(terms_of(5, 4), 5)
    with pytest.raises(TooFew, match="3 shares of a secret"):
        cohort.run({"unmask": [name_of(0), name_of(1)]})
    with pytest.raises(RuntimeError):
        cohort.server.unmasking_keys()


def test_the_plan_may_want_more_survivors_than_the_threshold():
    with pytest.raises(TooFew, match="4 clients sent masked vectors"):
        Cohort(terms_of(5, 3, min_survivors=5), 5).run({"masked": [name_of(0)]})


def test_a_k_regular_graph_sums_exactly_and_shares_with_neighbours_alone():
    terms = SecureTerms(40, 0.1, 0.1, lanes=9, width=16, graph="k-regular")
    cohort = Cohort(terms, 40)
    away = [name_of(i) for i in range(0, 40, 10)]
    cohort.run(
        {"share": away[:1], "masked": away[1:3], "agree": away[3:], "unmask": [name_of(i) for i in range(36, 40)]}
    )
    assert (cohort.server.graph.k, cohort.server.graph.t, len(cohort.server.survivors)) == (10, 5, 37)
    assert all(len(held) == 11 for held in cohort.server._holders.values())
    same(cohort)


def test_a_k_regular_graph_ends_without_a_sum_beyond_the_planned_drop_outs():
    terms = SecureTerms(40, 0.1, 0.1, lanes=9, width=16, graph="k-regular")
    with pytest.raises(TooFew, match="35 clients sent masked vectors"):
        Cohort(terms, 40).run({"masked": [name_of(i) for i in range(5)]})


def test_a_vector_may_be_withdrawn_until_the_survivors_are_shown():
    cohort = Cohort(terms_of(5, 3), 5)
    cohort.run(until="share")
    for name, request in cohort.requests.items():
        cohort.answer("masked", name, request)
        cohort.server.receive(name)
    cohort.server.withdraw_vector(name_of(4))
    for name, request in cohort.server.close().items():
        cohort.server.receive(name, cohort.answer("agree", name, request))
    with pytest.raises(RuntimeError, match="is one of them"):
        cohort.server.withdraw_vector(name_of(3))
    for name, request in cohort.server.close().items():
        cohort.server.receive(name, cohort.answer("unmask", name, request))
    cohort.server.close()
    assert cohort.server.survivors == tuple(map(name_of, range(4)))
    same(cohort)


def test_a_client_that_committed_to_another_secret_ends_the_round():
    cohort = Cohort(terms_of(4, 3), 4)
    one = cohort.participants[name_of(0)]
    one._self_seed = bytes(32)  # it shares another seed than it committed to
    cohort.run()
    with pytest.raises(Aborted, match="client-000 dealt shares of another secret"):
        cohort.sum()


@pytest.mark.parametrize("post_quantum", [False, True])
def test_a_client_that_shares_another_root_than_its_keys_come_from_ends_the_round(post_quantum):
    cohort = Cohort(terms_of(4, 3, post_quantum=post_quantum), 4)
    cohort.participants[name_of(0)]._root = bytes(32)
    cohort.run({"masked": [name_of(0)]})
    with pytest.raises(Aborted, match="client-000 dealt shares of another secret"):
        cohort.sum()


def test_a_client_that_leaves_other_secrets_of_ml_kem_in_its_escrow_ends_the_round(monkeypatch):
    def forged(key: bytes, plain: bytes, associated: bytes) -> bytes:
        is_escrow = len(plain) == 3 * SECRET_BYTES  # of three neighbours; shares of a root and a seed are shorter
        return seal(key, bytes(len(plain)) if is_escrow else plain, associated)

    cohort = Cohort(terms_of(4, 3, post_quantum=True), 4)
    monkeypatch.setattr(participant, "seal", forged)
    cohort.run({"masked": [name_of(0)]})
    with pytest.raises(Aborted, match="the masks do not cancel"):
        cohort.sum()


def test_a_damaged_vector_ends_the_round():
    cohort = Cohort(terms_of(4, 3), 4)
    cohort.run()
    vectors = cohort.vectors[name_of(1)]
    cohort.vectors[name_of(1)] = replace(vectors, scalars=b"\0" * len(vectors.scalars))
    with pytest.raises(Aborted, match="the masks do not cancel"):
        cohort.sum()


def test_a_message_out_of_its_phase_is_refused():
    cohort = Cohort(terms_of(4, 3), 4)
    first = cohort.participants[name_of(0)].advertise()
    cohort.server.receive(name_of(0), first)
    with pytest.raises(BadMessage, match="does not wait for"):
        cohort.server.receive(name_of(0), first)
    with pytest.raises(BadMessage, match="with another identity key"):
        cohort.server.receive(name_of(1), first)
    assert cohort.server.dropped == {name_of(1): "advertise"}


def test_the_same_messages_replay_to_the_same_round():
    cohort = Cohort(terms_of(6, 4), 6)
    cohort.run({"masked": [name_of(5)]})
    again = Cohort(terms_of(6, 4), 6)
    for phase in PHASES:
        for sent, name, message in cohort.sent:
            if sent == phase:
                again.server.receive(name, message)
        again.server.close()
    again.vectors, again.points = cohort.vectors, cohort.points
    assert again.server.unmasking_keys() == cohort.server.unmasking_keys()
    same(again)


def test_scalars_are_whole_numbers_of_any_type_and_a_fraction_masks_nothing():
    cohort = Cohort(terms_of(4, 3), 4)
    cohort.run(until="share")
    one, lanes = cohort.participants[name_of(0)], np.zeros(cohort.terms.lanes, np.uint16)
    one.prepare(cohort.requests[name_of(0)])
    with pytest.raises(TypeError):
        one.mask(lanes, [1, 0.5])  # type: ignore[list-item]  # on purpose
    assert one.state == "ready" and not lanes.any()
    assert len(one.mask(lanes, [np.int64(-1), np.int64(5)]).scalars) == 24  # type: ignore[list-item]  # on purpose
