"""A device's failure is of a device's kind: what only an aggregator can know of it is not for the device to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.attacks.places import attacked, device_of
from thinwire.core.fleet import ClientConnected
from thinwire.core.types import Failure


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("kind", ["offline", "refused", "stale", "over"])
def test_no_device_says_that_it_left_was_revoked_or_came_too_late(tmp_path: Path, tls: bool, kind: str) -> None:
    """ "offline" makes its round send the assignment again at its next hello.

    "refused" with "revoked" reads as an operator's order.
    """
    with attacked(tmp_path, tls=tls) as here:
        device = device_of(here)
        assert device.push(Failure(kind, "revoked", "toy-1.1.pi-1")).status == 200
        assert device.push(Failure("task-error", "ValueError in task.py:3", "toy-1.1.pi-1")).status == 200
        told = [arrival for arrival in here.fleet.poll(5.0) if not isinstance(arrival, ClientConnected)]
        first, second = (arrival for arrival in told if isinstance(arrival, Failure))
        assert (first.kind, first.text) == ("protocol", f"it says {kind!r}, which is not for a device to say: revoked")
        assert (second.kind, second.text) == ("task-error", "ValueError in task.py:3")
