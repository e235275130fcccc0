"""Secure rounds that the owner of a device limits: what a handler declines, and before what leaves the device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.secure_clients import SecureClients, failure_of, name_of, secure_identity, secure_plan
from tests.support.secure_cohort import identity
from thinwire.client.admission import AdmissionController
from thinwire.client.policy import Policy
from thinwire.core.types import Failure

ONE, LAST = name_of(0), name_of(3)
MALICIOUS = 'adversary = "malicious"\nmax_corrupt = 0.0\nmax_dropout = 0.25'
POLICIES = {
    "secure": (Policy(secure="required"), {"enabled": False}),
    "adversary": (Policy(adversary="malicious"), {}),
    "max_corrupt_assumed": (Policy(max_corrupt_assumed=0.3), {}),
    "min_cohort": (Policy(min_cohort=5), {}),
    "min_survivors": (Policy(min_survivors=3), {}),
}


@pytest.mark.parametrize("key", POLICIES)
def test_a_round_that_the_owner_does_not_allow_is_declined_before_anything_leaves(tmp_path, key):
    """Of each key: the same assignment is worked on without it."""
    policy, table = POLICIES[key]
    clients = SecureClients(tmp_path, owner=policy)
    plan = clients.plan.to_json()
    plan["secure"] = {**plan["secure"], **table}
    changed: dict[str, Any] = {"plan": plan} | ({"secure": None} if "enabled" in table else {})
    clients.open(**changed)  # an advertisement would be refused by the aggregator's side, because the plan differs
    assert {failure_of(clients, name)[0] for name in clients.handlers} == {"declined"}
    assert all(clients.replies[name].text.startswith(f"{key}: ") for name in clients.handlers)


def test_the_owner_limits_the_clients_of_the_roster_and_not_the_word_of_the_aggregator(tmp_path):
    """Five are said to be selected, and four are on the roster."""
    clients = SecureClients(tmp_path, secure_plan("max_dropout = 0.4"), owner=Policy(min_cohort=5), clients=5)
    clients.open(away=[name_of(4)])
    clients.run()
    assert {failure_of(clients, name_of(number)) for number in range(4)} == {("failed", "too-few")}


def test_the_owner_limits_the_survivors(tmp_path):
    plan = secure_plan("min_survivors = 3\nmax_dropout = 0.25")
    clients = SecureClients(tmp_path, plan, owner=Policy(min_survivors=3))
    clients.handlers[ONE].admission.set_policy(Policy(min_survivors=4, secure="required"))
    clients.open(away=[LAST])
    assert failure_of(clients, ONE)[0] == "declined"


def test_rounds_a_day_counts_rounds_and_not_their_phases(tmp_path):
    clients = SecureClients(tmp_path, owner=Policy(rounds_a_day=2))
    for _ in range(2):
        clients.open()
        clients.run()
        assert clients.sum()[1] == {"weight": 4}
    clients.open()
    assert {failure_of(clients, name)[1][:13] for name in clients.handlers} == {"rounds_a_day:"}


def test_a_malicious_aggregator_is_withstood_with_a_pinned_roster_alone(tmp_path):
    pinned = {name_of(number): identity(number) for number in range(4)}
    plan = secure_plan(MALICIOUS)
    with_one = {number: secure_identity(number, pinned=pinned) for number in range(4)}
    clients = SecureClients(tmp_path / "pinned", plan, identities=with_one)
    clients.open()
    clients.run()
    assert clients.sum()[1] == {"weight": 4}
    clients = SecureClients(tmp_path / "none", plan)
    clients.open()
    assert {failure_of(clients, name)[0] for name in clients.handlers} == {"declined"}
    stranger = {**pinned, LAST: identity(9)}
    clients = SecureClients(
        tmp_path / "other", plan, identities={n: secure_identity(n, pinned=stranger) for n in range(4)}
    )
    clients.open()
    request = clients.server.close()[ONE]
    reply = clients.phase(ONE, "share", request)
    assert isinstance(reply, Failure)
    assert reply.text == "roster"
    (said,) = (said for said in clients.said if "failed" in said)
    assert f"left the round: {LAST} is not in the pinned roster with this identity key (an aggregator that" in said
    assert "can take this device's update out of the sum); try: thinwire client start --roster SIGNED.json" in said


def test_a_client_without_an_identity_declines(tmp_path):
    clients = SecureClients(tmp_path)
    clients.handlers = {ONE: clients.handler(0, secure=None)}
    clients.open()
    assert failure_of(clients, ONE)[0] == "declined"
    clients.handlers = {
        ONE: clients.handler(0, secure=None, admission=AdmissionController(carries=frozenset({"secure"})))
    }
    clients.open()
    assert failure_of(clients, ONE) == ("declined", "secure: this client cannot sum under masks")


def test_a_device_without_random_bytes_takes_part_in_no_round_and_says_why(tmp_path, monkeypatch):
    def fail(count: int) -> bytes:
        raise OSError("no entropy")

    clients = SecureClients(tmp_path, identities={0: secure_identity(0)})
    monkeypatch.setattr("thinwire.privacy.secret_rng.os.urandom", fail)
    clients.handlers = {ONE: clients.handlers[ONE]}
    clients.open()
    assert failure_of(clients, ONE) == ("failed", "work")
    assert ONE in clients.server.outstanding, "no advertisement came"
    assert any("the operating system gives no random bytes" in said for said in clients.said)
