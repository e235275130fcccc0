"""A fleet is updated device by device: an aggregator of a version that is not there yet, and devices of this one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.callers import TlsPlace, tls_place
from tests.support.fleet_words import answer, envelope, hello, polled, pulled, written
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import Refused, Unreachable
from thinwire.core.fleet import Envelope, Hello, Link
from thinwire.core.protocol import Range
from thinwire.core.types import ReplyHeader


def of(oldest: int, newest: int, name: str = "pi-1") -> Hello:
    """The first words of a device that speaks these versions."""
    return replace(hello(name), protocol=newest, oldest=oldest)


def assigned_in(number: int, device: str, assignment_id: str, folder: Path, *bodies: bytes) -> Envelope:
    """An assignment of an aggregator whose newest version is this one."""
    made = envelope(device, assignment_id, folder, *bodies)
    return replace(made, assignment=replace(made.assignment, protocol=number))


@pytest.fixture(params=[True, False], ids=["tls", "plain"])
def newer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """An aggregator of protocol 2, which speaks protocol 1 still."""
    with place(tmp_path, tls=request.param, speaks=Range(1, 2)) as made:
        yield made


def a_round(here: Place, link: Link, number: int, name: str = "pi-1") -> int:
    """An assignment and its answer, both with parts; gives the version that the device was selected in."""
    assignment_id = f"assignment-{number}"
    here.fleet.send([assigned_in(2, name, assignment_id, here.folder, b"model")])
    delivery = pulled(link)
    assert delivery.bundle is not None
    assert delivery.bundle.read_bytes() == b"model"
    said = replace(answer(name, assignment_id, number, b"change"), protocol=1)
    link.push(said, written(here.folder, b"change"))
    header = polled(here.fleet, ReplyHeader, lambda reply: reply.assignment_id == assignment_id)
    assert b"".join(here.fleet.open(header.update_id)) == b"change"
    return delivery.assignment.protocol


def test_a_device_of_before_works_with_a_newer_aggregator_in_its_own_version(newer: Place) -> None:
    link = newer.link("pi-1")
    assert link.hello(of(1, 1)).protocol == 1
    assert [a_round(newer, link, number) for number in (1, 2)] == [1, 1]


def test_devices_of_both_versions_work_side_by_side_each_in_its_own(newer: Place) -> None:
    old, new = newer.link("pi-1"), newer.link("pi-2")
    assert (old.hello(of(1, 1)).protocol, new.hello(of(1, 2, "pi-2")).protocol) == (1, 2)
    assert (a_round(newer, old, 1), a_round(newer, new, 2, "pi-2")) == (1, 2)


def test_a_device_that_was_updated_speaks_the_new_version_from_its_next_hello_on(newer: Place) -> None:
    before = newer.link("pi-1")
    before.hello(of(1, 1))
    assert a_round(newer, before, 1) == 1
    before.close()
    after = newer.link("pi-1")
    assert after.hello(of(1, 2)).protocol == 2
    assert a_round(newer, after, 2) == 2


@pytest.mark.parametrize(
    ("aggregator", "device", "behind"),
    [(Range(1, 1), Range(2, 2), "the aggregator"), (Range(2, 3), Range(1, 1), "the device")],
)
def test_no_version_in_common_is_said_to_both_sides_with_both_ranges_and_who_is_to_be_updated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, aggregator: Range, device: Range, behind: str
) -> None:
    with tls_place(tmp_path, speaks=aggregator) as here, caplog.at_level(logging.WARNING, "thinwire.door"):
        link = here.link("pi-1")
        for _ in range(2):  # a device tries for ever: it is written down once
            with pytest.raises(Unreachable) as refused:
                link.hello(of(device.oldest, device.newest))
        on_the_device, (in_the_log,), (noted,) = refused.value.text(), caplog.messages, here.store.audit.notes()
        for told in (on_the_device, in_the_log, noted.why):
            assert f"the aggregator speaks {aggregator}, the device {device}" in told
            assert f"{behind} is older" in told
        assert f"update thinwire on {behind}" in on_the_device
        assert "pi-1" in in_the_log
        assert (noted.kind, noted.name, noted.address) == ("protocol", "pi-1", "127.0.0.1")
        assert refusals(here) == {"/tw/v1/hello 403": 2}


def test_on_a_plain_device_api_a_person_is_told_at_once(tmp_path: Path) -> None:
    with place(tmp_path, speaks=Range(1, 1)) as here:
        with pytest.raises(Refused, match="does not speak this client's protocol") as refused:
            here.link("pi-1").hello(of(2, 2))
        assert "the aggregator speaks 1, the device 2" in refused.value.why
        assert here.roster.rows() == []
        ((kind, _, why, name),) = here.roster.notes
        assert (kind, name, why in refused.value.why) == ("protocol", "pi-1", True)


def refusals(here: TlsPlace) -> dict[str, int]:
    return {path: count for path, count in here.fleet.stats()["refused"].items() if path.endswith("403")}
