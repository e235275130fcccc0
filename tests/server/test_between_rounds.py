"""What comes while no round is open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from thinwire.core.types import Failure
from thinwire.server.context import RunContext
from thinwire.server.run import listen

ASK = "toy-1.3.c"


def stub(lost: list[str], deferred: dict[str, Any], *arrivals: Failure) -> RunContext:
    """What `listen` looks at of a run with delayed averaging, whose device c owes round 3 an answer."""
    ledger = SimpleNamespace(
        is_outstanding=lambda device, assignment_id: (device, assignment_id) == ("c", ASK), busy=set()
    )
    return cast(
        RunContext,
        SimpleNamespace(
            poll=lambda wait_s: arrivals, run_state=SimpleNamespace(ledger=ledger), deferred=deferred, elapsed=0.0,
            reconnect_until_s=1.0, lose=lambda device, kind, text, assignment_id: lost.append(assignment_id),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("kept", "expected"), [({}, [ASK]), ({ASK: object()}, [])])
def test_an_assignment_fails_unless_an_answer_to_it_is_kept_for_its_turn(
    kept: dict[str, Any], expected: list[str]
) -> None:
    lost: list[str] = []
    failure = Failure(kind="state-lost", text="other bytes", assignment_id=ASK, device="c")
    listen(stub(lost, kept, failure), 0.0)
    assert lost == expected
