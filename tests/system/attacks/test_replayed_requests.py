"""No request is served twice, also when the aggregator is started again in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import Caller
from tests.support.fleet_words import hello
from tests.support.transport_doubles import Place
from tests.system.attacks.places import attacked
from thinwire.transport.device.identity import ServerClock
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, pack
from thinwire.transport.protocol.signing import public_der


@pytest.fixture(params=["plain", "tls"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with attacked(tmp_path, tls=request.param == "tls") as made:
        yield made


def approved(here: Place, ahead_s: float) -> Caller:
    """A device that the aggregator knows, whose stamps are so much ahead."""
    caller = Caller(here, now=lambda: time.time() + ahead_s)
    here.roster.add("pi-1", public_der(caller.key.public_key()), "manual")
    return caller


@pytest.mark.parametrize("ahead_s", [0.05, 0.5, 4.9])
def test_a_request_that_is_stamped_ahead_is_served_once_over_a_restart(here: Place, ahead_s: float) -> None:
    caller = approved(here, ahead_s)
    body = pack(registration.to_bytes(hello("pi-1")))
    recorded = caller.signed("POST", HELLO, body)
    before = caller.call("POST", HELLO, body, recorded)
    here.restart()
    after = caller.call("POST", HELLO, body, recorded)
    assert (before.status, after.status) != (200, 200)
    if before.status == 200:
        assert after.short == (401, "clock")


@pytest.mark.parametrize("ahead_s", [0.03, 3.0, 86_400.0])
def test_a_device_whose_clock_is_ahead_corrects_it_by_itself_also_after_a_restart(here: Place, ahead_s: float) -> None:
    link = here.link("pi-1", clock=ServerClock(lambda: time.time() + ahead_s))
    link.hello(hello("pi-1"))
    here.restart()
    link.hello(hello("pi-1"))
    assert link.pull(0.0) is None
