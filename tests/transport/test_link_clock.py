"""A device behind TLS knows the time from the device API: with a clock, without one, or with one that is stepped."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet_words import answer, envelope, hello, polled, pulled, written  # fmt: skip
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import Unreachable
from thinwire.core.types import Failure, ReplyHeader
from thinwire.transport.device.identity import ServerClock
from thinwire.transport.server.tls import InternalCA

DAY_S = 86_400.0
ROUNDED_S = 2.0  # a skew is shown in whole seconds, and the device API tells its time in such


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, tls=True) as made:
        yield made


@pytest.mark.parametrize(
    "wall", [20.0, time.time() + DAY_S, time.time() - DAY_S, 4e9], ids=["1970", "+1", "-1", "2096"]
)
def test_a_wrong_clock_is_corrected_by_one_answer_and_shown(here: Place, wall: float) -> None:
    link, began = here.link("pi-1", clock=ServerClock(lambda: wall)), time.time()
    link.hello(hello("pi-1"))
    skew_s = here.roster.hellos[-1].link["skew_s"]
    assert began - ROUNDED_S <= skew_s + wall <= time.time() + ROUNDED_S, "the device API's time, some time in between"
    assert here.fleet.stats()["refused"] == {"/tw/v1/hello 401": 1}
    link.pull(0.0)
    link.push(Failure("task-error", "x", "assignment-1"))
    assert sum(here.fleet.stats()["refused"].values()) == 1


def test_a_right_clock_is_not_worth_a_word(here: Place) -> None:
    here.link("pi-1").hello(hello("pi-1"))
    assert [said.link["skew_s"] for said in here.roster.hellos] == [0.0]


def test_a_skew_that_the_device_api_takes_is_shown_too(here: Place) -> None:
    began = time.time()
    here.link("pi-1", clock=ServerClock(lambda: time.time() - 100)).hello(hello("pi-1"))
    late_s = time.time() - began  # at the most: what the answer said was right when it left
    assert 100 - late_s - ROUNDED_S <= here.roster.hellos[-1].link["skew_s"] <= 100 + ROUNDED_S


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S, -50 * 365 * DAY_S])
def test_a_clock_that_is_stepped_in_a_round_disturbs_nothing(here: Place, tmp_path: Path, step_s: float) -> None:
    wall = [0.0]
    link = here.link("pi-1", clock=ServerClock(lambda: time.time() + wall[0]))
    link.hello(hello("pi-1"))
    here.fleet.send([envelope("pi-1", "assignment-1", tmp_path, b"model")])
    assert pulled(link).assignment.assignment_id == "assignment-1"
    wall[0] = step_s
    link.push(answer("pi-1", "assignment-1", 1, b"abc"), written(tmp_path, b"abc"))
    assert polled(here.fleet, ReplyHeader).assignment_id == "assignment-1"
    assert not here.fleet.stats()["refused"]
    assert link.clock.skew_s == pytest.approx(-step_s, abs=5)


def test_what_was_signed_before_the_aggregator_began_is_signed_again(here: Place) -> None:
    """The device's clock is within the window, and behind the restart."""
    link = here.link("pi-1", clock=ServerClock(lambda: time.time() - 60))
    link.hello(hello("pi-1"))
    assert here.fleet.stats()["refused"] == {"/tw/v1/hello 401": 1}


@pytest.mark.parametrize("wall", [None, 20.0], ids=["with a clock", "without one"])
@pytest.mark.parametrize("days", [-200, 200], ids=["ended", "begins"])
def test_a_certificate_outside_its_dates_is_refused_once_the_time_is_known(
    tmp_path: Path, wall: float | None, days: int
) -> None:
    def now() -> dt.datetime:
        return dt.datetime.now(dt.UTC) + dt.timedelta(days=days)

    with place(tmp_path, tls=True) as made:
        folder = made.folder
        made.link("pi-1")
        roster = made.roster
    for path in (folder / "ca").glob("*"):
        if path.suffix in (".pem", ".key") and ".ca" not in path.name:
            path.unlink()
    with place(folder, roster=roster, authority=InternalCA(folder / "ca", now=now)) as again:
        again.authority = again.options["authority"]
        link = again.link("pi-1", clock=ServerClock(lambda: wall if wall is not None else time.time()))
        with pytest.raises(Unreachable, match="is not valid now"):
            link.hello(hello("pi-1"))
        with pytest.raises(Unreachable):
            link.push(answer("pi-1", "assignment-1"))
