"""A client that is killed at a boundary of a secure round, and whose state directory is an earlier copy.

Whatever copy is restored, the aggregator gets at most one masked vector and at most one answer to `unmask` of a client
and round, and never both shares of a peer. A vector that may have left counts as included in the residual.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.support.secure_clients import SecureClients, changed_of, failure_of, message_of, name_of
from tests.support.small_task import RUN
from thinwire.client.policy import Policy
from thinwire.core.types import Failure, PhaseReply, ReplyHeader, assignment_id_of
from thinwire.privacy.messages import Advertisement, Disclosure, Roster

ONE = name_of(0)
PHASES = ("share", "masked", "agree", "unmask")
BOUNDARIES = ("begun", *PHASES)  # after the advertisement, and after the answer of each phase


@dataclass
class Got:
    """What the aggregator got of the client that is killed, over all its lives in one round."""

    vectors: set[bytes] = field(default_factory=set)
    unmasked: set[bytes] = field(default_factory=set)
    requests: dict[str, bytes] = field(default_factory=dict)

    def take(self, clients: SecureClients) -> None:
        """Take what the client's present process gives: what is on its disk, and answers to all requests so far."""
        for header, body in clients.handlers[ONE].unsent_replies():
            assert isinstance(header, ReplyHeader)
            if header.assignment_id == f"{RUN}.{clients.number}.{ONE}":
                assert body is not None
                self.vectors.add(body.read_bytes())
        for phase, request in self.requests.items():
            reply = clients.phase(ONE, phase, request)
            if phase == "unmask" and isinstance(reply, PhaseReply):
                self.unmasked.add(message_of(reply))

    def hold_the_law(self) -> None:
        assert len(self.vectors) <= 1
        assert len(self.unmasked) <= 1
        for raw in self.unmasked:
            peers = [peer for peer, *_ in Disclosure.read(raw, 4).shares]
            assert len(peers) == len(set(peers))


def copied(clients: SecureClients, name: str) -> Path:
    to = clients.folder / "copies" / name
    shutil.copytree(clients.folder / ONE, to)
    return to


def lives(clients: SecureClients, upto: str, got: Got) -> Iterator[str]:
    """Play a round until the answer of a phase; a copy of the client's state is made at each boundary."""
    copied(clients, "before")
    clients.open()
    copied(clients, "begun")
    yield "begun"
    clients.requests = clients.server.close()
    for phase in PHASES[: PHASES.index(upto) + 1] if upto != "begun" else ():
        got.requests[phase] = clients.requests[ONE]
        clients.resume(phase, until=phase)
        copied(clients, phase)
        yield phase
    got.vectors |= {clients.bodies[ONE]} if ONE in clients.bodies else set()
    if upto == "unmask":
        got.unmasked.add(message_of(clients.answered["unmask"][ONE]))


def restored(clients: SecureClients, copy: Path) -> None:
    """Kill the client, and start it again on a copy of its state directory."""
    shutil.rmtree(clients.folder / ONE)
    shutil.copytree(copy, clients.folder / ONE)
    clients.handlers[ONE] = clients.handler(0)


@pytest.mark.parametrize("killed_after", BOUNDARIES)
def test_a_client_that_is_killed_and_put_back_reveals_nothing_twice(tmp_path: Path, killed_after: str) -> None:
    clients, got = SecureClients(tmp_path), Got()
    copies = ["before", *lives(clients, killed_after, got)]
    requests, advertised = dict(clients.requests), set[bytes]()
    if killed_after != "begun":
        roster = Roster.read(clients.requested["share"][ONE], post_quantum=False)
        advertised = {one.write() for one in roster.clients}
    if killed_after != "unmask":  # the aggregator goes on, and asks the new process too
        following = BOUNDARIES[BOUNDARIES.index(killed_after) + 1]
        got.requests[following] = requests[ONE]
    for copy in copies:
        restored(clients, tmp_path / "copies" / copy)
        got.take(clients)
        again = list[PhaseReply]()
        clients.handlers[ONE].begin(
            clients.assignment(ONE), lambda: False, clients.said.append, send=again.append
        )  # the same assignment comes again: a new process is another participant
        got.take(clients)
        got.hold_the_law()
        assert all(message_of(reply) not in advertised for reply in again)
        if killed_after != "begun" and again:  # the others take part with the first one alone
            refuse_a_second_roster(clients, message_of(again[0]))


def refuse_a_second_roster(clients: SecureClients, advertisement: bytes) -> None:
    """A roster with the new process is another request for `share`: no client masks a second vector with it."""
    for name in set(clients.handlers) - {ONE}:
        made = Roster.read(clients.requested["share"][name], post_quantum=False).clients
        second = Advertisement.read(advertisement, post_quantum=False)
        roster = Roster(tuple(second if one.name == ONE else one for one in made)).write()
        reply = clients.phase(name, "share", roster)
        assert isinstance(reply, Failure)
        assert reply.text in ("another-request", "order")


def test_a_vector_that_left_is_in_the_residual_though_the_client_was_killed(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    change = changed_of(clients.begun[ONE])
    clients.run(until="masked")
    kept = clients.residual(ONE).copy()
    clients.handlers[ONE] = clients.handler(0)
    assert [header for header, _ in clients.handlers[ONE].unsent_replies()] == [clients.headers[ONE]]
    clients.open()
    np.testing.assert_array_equal(clients.residual(ONE), kept)
    assert np.abs(change - kept).max() > 0, "what was sent is not in the residual"


def test_a_client_killed_before_its_vector_trains_without_a_residual_of_that_round(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    kept = clients.residual(ONE).copy()
    clients.open()
    clients.run(until="share")
    clients.handlers[ONE] = clients.handler(0)
    clients.open()
    np.testing.assert_array_equal(clients.residual(ONE), kept)


@pytest.mark.parametrize("claimed", [1, 1000])
def test_an_aggregator_that_claims_to_have_seen_more_gets_no_second_vector_of_a_round(
    tmp_path: Path, claimed: int
) -> None:
    """A new process discards state that is older than the replies that the aggregator has seen, by its word alone.

    With a second vector of three of the four clients, the difference of both sums would be the update of the fourth.
    """
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    for number in range(3):
        clients.handlers[name_of(number)] = handler = clients.handler(number)
        handler.continue_sequences({RUN: claimed}, {RUN: "run-identity"})
        handler.unsent_replies()
    for name in list(clients.handlers)[:3]:
        again = clients.assignment(name, assignment_id=f"{assignment_id_of(RUN, 1, name)}-again")
        reply = clients.handlers[name].begin(again, lambda: False, clients.said.append, send=lambda sent: None)
        assert isinstance(reply, tuple), "it has begun"
        assert isinstance(reply[0], Failure)
        assert (reply[0].kind, reply[0].text) == ("failed", "order")
    clients.open()
    assert len(clients.begun) == 4, "the next round is another one"


def test_a_declined_assignment_of_another_run_of_this_name_gives_no_second_vector_of_a_round(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path, owner=Policy(secure="required"))
    clients.open()
    clients.run()
    kept = clients.residual(ONE)
    plan = clients.plan.to_json()
    plan["secure"] = {**plan["secure"], "enabled": False}
    clients.begin(ONE, assignment_id=f"clear.{ONE}", identity="another", plan=plan, secure=None)
    assert failure_of(clients, ONE)[0] == "declined"
    clients.begin(ONE, assignment_id=f"{RUN}.1+.{ONE}")
    assert failure_of(clients, ONE) == ("failed", "order")
    assert clients.residual(ONE) is kept


def test_a_round_is_forgotten_with_its_run(tmp_path: Path) -> None:
    """Otherwise a device would keep the secrets of each run whose aggregator went silent in a round."""
    clients = SecureClients(tmp_path, owner=Policy(max_runs=1))
    clients.open()
    clients.run(until="masked")
    rounds = clients.handlers[ONE].rounds
    assert rounds.runs == {RUN}
    other = clients.assignment(ONE, run="small-2", assignment_id="small-2.1.pi-00")
    clients.handlers[ONE].begin(other, lambda: False, clients.said.append, send=lambda sent: None)
    assert rounds.runs == {"small-2"}
