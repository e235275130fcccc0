"""What a malicious aggregator tries so that a sum of many clients has one client's numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from tests.support.secure_clients import SecureClients, changed_of, name_of, secure_identity, secure_plan
from tests.support.secure_cohort import identity
from tests.support.small_task import RUN
from thinwire.core.types import Assignment, Failure
from thinwire.privacy.messages import BadMessage
from thinwire.privacy.participant import SecureIdentity

ONE = name_of(0)
PINNED = {name_of(number): identity(number) for number in range(4)}
DEAD = slice(32, 40)  # biases of the hidden units of `relu`
NOTHING = 2.0**-40  # a clip that leaves each update in its residual


def relu() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def with_roster() -> Mapping[int, SecureIdentity]:
    return {number: secure_identity(number, pinned=PINNED) for number in range(4)}


def test_a_client_that_alone_is_to_evaluate_is_not_in_a_round_with_the_others(tmp_path: Path) -> None:
    """The sum of the metrics would be its own."""
    plan = secure_plan("metrics = { loss = 10.0, accuracy = 1.0 }", run='evaluate = "clients"')
    clients = SecureClients(tmp_path, plan)
    clients.open(away=list(clients.handlers))
    clients.begin(ONE)
    with pytest.raises(BadMessage, match="is not signed for this round"):
        clients.begin(name_of(1), evaluates=False)


@pytest.mark.parametrize("adversary", ["curious", "malicious"])
def test_no_residual_is_summed_alone_in_a_plan_against_a_malicious_aggregator(tmp_path: Path, adversary: str) -> None:
    """The first round leaves all in the residuals. The second one sums one of them beside three that are empty.

    A curious aggregator has no such model and clip: it follows the protocol.
    """
    plan = secure_plan(f'clip = "auto"\nbits = 16\nadversary = "{adversary}"')
    clients = SecureClients(tmp_path, plan, functions={"model": relu}, identities=with_roster())
    clients.clip = NOTHING
    clients.open()
    learned = changed_of(clients.begun[ONE])[: DEAD.start]
    clients.run()
    for number in (1, 2, 3):
        clients.handlers[name_of(number)].stop(
            Assignment("stop", RUN, "small", "stop", plan.digest, identity="run-identity"), clients.said.append
        )
    clients.clip, clients.params = 8.0, clients.params.copy()
    clients.params[DEAD] = -1e6
    clients.open()
    clients.run()
    found = 4 * clients.sum()[0][: DEAD.start]
    assert np.abs(learned).max() > 0.01
    is_alone = np.corrcoef(found, learned)[0, 1] > 0.99
    assert is_alone is np.bool_(adversary == "curious")
    assert (clients.residual(ONE) is None) is (adversary == "malicious")


def test_the_end_of_a_run_gives_no_second_sum_of_its_round(tmp_path: Path) -> None:
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    over = Assignment("stop", RUN, "small", "stop", clients.plan.digest, identity="run-identity")
    clients.handlers[ONE].stop(over, clients.said.append)
    clients.handlers[ONE] = clients.handler(0)
    clients.begin(ONE, assignment_id=f"{RUN}.1+.{ONE}")
    found = clients.replies[ONE]
    assert isinstance(found, Failure)
    assert (found.kind, found.text) == ("failed", "order")


def test_a_restored_aggregator_that_makes_a_round_again_gets_other_updates_in_its_sum(tmp_path: Path) -> None:
    """With the same updates in two sums, of which the second lacks one client, the difference would be its update."""
    clients = SecureClients(tmp_path, secure_plan("bits = 16"), functions={"model": relu})
    clients.open()
    first = {name: changed_of(begun) for name, begun in clients.begun.items()}
    clients.run()
    clients.run_identity, clients.number = "restored", 0
    clients.open(away=[name_of(3)])
    again = {name: changed_of(begun) for name, begun in clients.begun.items()}
    assert len(again) == 3
    for name, change in again.items():
        apart = float(np.linalg.norm(change - first[name]))
        assert apart > 0.01 * float(np.linalg.norm(change)), name
