"""An aggregator that tells the clients of a secure round different things: real handlers, and what the others do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.secure_clients import SecureClients, message_of, name_of, secure_plan
from tests.support.secure_cohort import identity
from thinwire.core.types import Failure, SecureWork, Work
from thinwire.privacy.messages import Advertisement, BadMessage, Delivery, Disclosure, Roster, Survivors
from thinwire.privacy.secure_round import MaskedSum

VICTIM, OTHER, LAST = name_of(0), name_of(1), name_of(3)
PHASES = ("share", "masked", "agree", "unmask")
RAW = (b"", b"\xff" * 64, b"\xff\xff" + bytes(40), bytes(4000))
TOLD: dict[str, dict[str, Any]] = {
    "gradient clip": {"work": Work(3, 8, 1e-30)},
    "steps": {"work": Work(1, 8)},
    "batch": {"work": Work(3, 4)},
    "model": {},
    "round": {"round": 7},
    "norm": {"secure": SecureWork(4, 0, 1e-6)},
    "number of clients": {"secure": SecureWork(5, 0, 1.0)},
    "window": {"secure": SecureWork(4, 1, 1.0)},
    "run": {"identity": "another-identity"},
}


def refusal(reply: object) -> str:
    """The word with which a client left the round."""
    assert isinstance(reply, Failure), reply
    assert reply.kind == "failed"
    return reply.text


def refuses(clients: SecureClients, name: str, phase: str, request: bytes, word: str) -> None:
    """The client leaves the round at this request, and answers nothing in it any more."""
    assert refusal(clients.phase(name, phase, request)) == word
    for later in PHASES:
        assert refusal(clients.phase(name, later, request)) == "order"


@pytest.mark.parametrize("what", TOLD)
def test_a_client_that_is_told_something_else_is_in_no_sum_with_the_others(tmp_path: Path, what: str) -> None:
    """Its advertisement is not signed for the round of the others, and they refuse a roster that has it."""
    clients = SecureClients(tmp_path, secure_plan("support = 0.5"))  # a plan of two windows
    clients.open(away=[VICTIM])
    sent = list[Any]()
    if what == "model":
        clients.params = clients.params + np.float32(0.5)
    clients.handlers[VICTIM].begin(
        clients.assignment(VICTIM, **TOLD[what]), lambda: False, clients.said.append, send=sent.append
    )
    assert len(sent) == 1, clients.said
    with pytest.raises(BadMessage, match="not signed for this round"):
        clients.server.receive(VICTIM, message_of(sent[0]))
    honest = Roster.read(clients.server.close()[OTHER], post_quantum=False).clients
    forged = Roster((Advertisement.read(message_of(sent[0]), post_quantum=False), *honest)).write()
    for name in (OTHER, LAST):
        refuses(clients, name, "share", forged, "signature")


def test_two_lists_of_survivors_gather_no_signatures_together(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run(until="masked")
    asked = clients.phase(VICTIM, "agree", Survivors((1, 2, 3)).write())
    with pytest.raises(BadMessage, match="another list of survivors"):
        clients.server.receive(VICTIM, message_of(asked))
    refuses(clients, VICTIM, "agree", clients.requests[VICTIM], "another-request")


EARLIER = {"share": ("roster", "signature"), "masked": ("shares",), "unmask": ("signature",)}


@pytest.mark.parametrize("phase", EARLIER)
def test_a_request_of_an_earlier_round_ends_the_clients_part(tmp_path: Path, phase: str) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    earlier = clients.requested[phase][VICTIM]
    clients.open()
    if phase == "share":
        clients.server.close()
    else:
        clients.run(until=PHASES[PHASES.index(phase) - 1])
    assert refusal(clients.phase(VICTIM, phase, earlier)) in EARLIER[phase]


def test_a_signature_under_the_survivors_of_an_earlier_round_does_not_count(tmp_path: Path) -> None:
    """The same clients survived in both rounds, so the lists are equal bytes; the contexts differ."""
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    earlier = message_of(clients.answered["agree"][VICTIM])
    clients.open()
    clients.run(until="masked")
    with pytest.raises(BadMessage, match="or in another context"):
        clients.server.receive(VICTIM, earlier)


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_phase_before_its_turn_ends_the_clients_part(tmp_path: Path, phase: str) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    request = clients.requested[phase][VICTIM]
    clients.open()
    refuses(clients, VICTIM, phase, request, "order")


def test_a_client_answers_no_phase_of_a_round_in_which_it_did_not_advertise(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open(away=[LAST])
    request = clients.server.close()[VICTIM]
    for phase in PHASES:
        assert refusal(clients.phase(LAST, phase, request)) == "order"


def test_a_roster_with_a_key_twice_is_refused_by_all(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    honest = Roster.read(clients.server.close()[VICTIM], post_quantum=False).clients
    twice = Roster((*honest[:-1], replace(honest[-1], mask=honest[1].mask))).write()
    for name in (VICTIM, OTHER):
        refuses(clients, name, "share", twice, "roster")


def test_no_client_discloses_both_shares_of_a_peer(tmp_path: Path) -> None:
    """Also where the aggregator shows a second list of survivors, on which the peer dropped out."""
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    disclosed = Disclosure.read(message_of(clients.answered["unmask"][VICTIM]), 4)
    assert [peer for peer, *_ in disclosed.shares] == [1, 2, 3, 4]
    assert not any(is_root for _, is_root, _ in disclosed.shares)
    refuses(clients, VICTIM, "agree", Survivors((1, 2, 3)).write(), "another-request")


@pytest.mark.parametrize("phase", PHASES)
def test_bytes_that_are_no_request_end_the_clients_part(tmp_path: Path, phase: str) -> None:
    """Each client of the round gets others."""
    clients = SecureClients(tmp_path)
    clients.open()
    if phase != "share":
        clients.run(until=PHASES[PHASES.index(phase) - 1])
    else:
        clients.server.close()
    for name, raw in zip(clients.handlers, RAW, strict=True):
        assert isinstance(clients.phase(name, phase, raw), Failure), raw
        assert refusal(clients.phase(name, phase, raw)) == "order", raw


def test_a_client_that_was_told_of_fewer_sharers_spoils_the_sum_and_the_sum_is_not_used(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run(until="share")
    whole = Delivery.read(clients.requests[VICTIM], 1, 4, post_quantum=False)
    fewer = Delivery(whole.sharers[:3], whole.nonces[:3], whole.dealt[:2]).write()
    clients.requests = {**clients.requests, VICTIM: fewer}
    clients.resume("masked", until="masked")
    reply = clients.phase(VICTIM, "agree", clients.requests[VICTIM])
    assert refusal(reply) == "survivors", "its own list of sharers has no fourth client"
    total = MaskedSum(clients.terms)
    for name in clients.handlers:
        total.add(*clients.vectors(name))
    assert np.any(total.update != 0)


def test_a_client_whose_identity_key_is_another_devices_is_not_on_the_roster(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open(away=[LAST])
    honest = clients.server.close()[VICTIM]
    made = Roster.read(honest, post_quantum=False).clients
    sybil = replace(made[0], name=LAST, identity=identity(0))
    for name in (VICTIM, OTHER):
        assert isinstance(clients.phase(name, "share", Roster((*made, sybil)).write()), Failure)
