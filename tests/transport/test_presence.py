"""Who counts as there: devices that wait, come back, become something else, or never said hello."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fleet_words import PATIENCE_S, envelope, hello, join, polled, pulled, until
from tests.support.transport_doubles import Place, place
from thinwire.core.equipment import Equipment
from thinwire.core.errors import Unreachable
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Delivery, DeviceRow, Link
from thinwire.core.types import Failure


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def test_a_device_that_waits_has_not_left(tmp_path: Path) -> None:
    with place(tmp_path, grace_s=0.05, poll_s=0.3) as here:
        link = join(here, "pi-1")
        polled(here.fleet, ClientConnected)
        for _ in range(3):
            link.pull(5.0)
        assert list(here.fleet.poll(0.0)) == []
        assert (
            "has not called" in polled(here.fleet, ClientDisconnected).why
        )  # its connection is open, and it is silent
        link.pull(0.0)
        assert polled(here.fleet, ClientConnected).device == "pi-1"


def test_a_device_that_comes_back_within_the_grace_has_not_left(tmp_path: Path) -> None:
    with place(tmp_path, grace_s=30.0) as here:
        join(here, "pi-1").close()
        join(here, "pi-1")
        assert {type(arrival) for arrival in here.fleet.poll(0.1)} == {ClientConnected}


def test_flowers_registry_knows_who_is_online(here: Place) -> None:
    state = here.fleet._superlink.state

    def online() -> list[str]:
        return [node.name for node in state.get_node_info(statuses=["online"])]

    link = join(here, "pi-1")
    assert online() == ["pi-1"]
    link.close()
    polled(here.fleet, ClientDisconnected)
    assert online() == []


def test_an_assignment_to_nobody_fails_at_once(here: Place) -> None:
    here.fleet.send([envelope("nobody", "assignment-1")])
    failure = polled(here.fleet, Failure)
    assert (failure.kind, failure.assignment_id, failure.device) == ("offline", "assignment-1", "nobody")


def test_hundreds_wait_and_all_are_woken(here: Place) -> None:
    """The links wait in threads; the device API needs none for them."""
    links = [join(here, f"pi-{i}") for i in range(100)]
    got: list[str] = []

    def wait(link: Link) -> None:
        got.append(pulled(link).assignment.assignment_id)

    threads = [threading.Thread(target=wait, args=(link,)) for link in links]
    before = threading.active_count()
    for thread in threads:
        thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] >= 100)
    assert threading.active_count() <= before + 100
    here.fleet.send([envelope(f"pi-{i}", f"assignment-{i}") for i in range(100)])
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(got) == sorted(f"assignment-{i}" for i in range(100))


def test_a_device_tells_what_it_has_become_while_a_pull_waits(here: Place) -> None:
    """`client reload`: the pull that waits goes on, and gets the assignment that comes then."""
    link, said = here.link("pi-1"), hello("pi-1")
    link.hello(said)
    polled(here.fleet, ClientConnected)
    got: list[Delivery | None] = []
    waiting = threading.Thread(target=lambda: got.append(link.pull(PATIENCE_S)))
    waiting.start()
    until(lambda: (connection := here.fleet._presence.of("pi-1")) and connection.pull_epoch)
    link.hello(replace(said, versions={**said.versions, "task": "2.0"}))
    assert polled(here.fleet, ClientConnected).hello.versions["task"] == "2.0"
    assert got == []
    here.fleet.send([envelope("pi-1", "assignment-1")])
    waiting.join(PATIENCE_S)
    assert [delivery and delivery.assignment.assignment_id for delivery in got] == ["assignment-1"]
    link.push(Failure("declined", "", "assignment-1", "pi-1"))
    assert polled(here.fleet, Failure).assignment_id == "assignment-1"


def test_a_device_that_lacks_something_by_now_says_so_to_the_run_that_goes_on(here: Place) -> None:
    link, said = here.link("pi-1"), replace(hello("pi-1"), has=Equipment(cores=4, mains=True))
    for has in (said.has, Equipment(cores=4, mains=False), Equipment(cores=1, mains=False)):
        link.hello(replace(said, has=has))
        assert polled(here.fleet, ClientConnected).hello.has == has


def rename(here: Place, **names: str) -> None:
    """All at once: two may swap theirs."""
    rows = {new.replace("_", "-"): here.roster.devices.pop(old.replace("_", "-")) for old, new in names.items()}
    here.roster.devices |= {new: replace(row, name=new) for new, row in rows.items()}


def test_a_device_that_is_renamed_has_left_by_its_old_name_when_it_comes_by_the_new_one(here: Place) -> None:
    link = join(here, "pi-1")
    polled(here.fleet, ClientConnected)
    rename(here, pi_1="lab-1")
    link.pull(0.0)
    left, came = here.fleet.poll(0.2)
    assert isinstance(left, ClientDisconnected)
    assert (left.device, left.why) == ("pi-1", "it is called lab-1 now")
    assert isinstance(came, ClientConnected)
    assert came.device == "lab-1"
    here.fleet.send([envelope("lab-1", "assignment-1")])
    assert pulled(link).device == "lab-1"


def test_a_device_that_is_renamed_while_it_waits_for_work_comes_by_its_new_name_at_once(tmp_path: Path) -> None:
    with place(tmp_path, grace_s=0.2, poll_s=240.0) as here:
        link, got = join(here, "pi-1"), list[Delivery]()
        polled(here.fleet, ClientConnected)

        def wait() -> None:
            while not got:
                got.extend(filter(None, [link.pull(240.0)]))

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: (connection := here.fleet._presence.of("pi-1")) and connection.pull_epoch)
        rename(here, pi_1="lab-1")
        came = list[Arrival]()  # both may come in one poll
        for _ in range(2):
            if len(came) < 2:
                came += here.fleet.poll(PATIENCE_S)
        gone, back = came
        assert isinstance(gone, ClientDisconnected)
        assert isinstance(back, ClientConnected)
        assert (gone.why, back.device) == ("it is called lab-1 now", "lab-1")
        here.fleet.send([envelope("lab-1", "assignment-1")])
        waiting.join(PATIENCE_S)
    assert [delivery.device for delivery in got] == ["lab-1"]


def test_a_database_that_is_not_readable_for_a_moment_ends_no_watch_over_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(tmp_path, grace_s=0.2) as here:
        link, looks = join(here, "pi-1"), threading.Semaphore(0)

        def unreadable() -> list[DeviceRow]:
            looks.release()
            raise Unreachable("cannot reach the database")

        with monkeypatch.context() as broken:
            broken.setattr(here.roster, "rows", unreadable)
            assert looks.acquire(timeout=PATIENCE_S)
        link.close()
        assert polled(here.fleet, ClientDisconnected).device == "pi-1"


def test_who_takes_over_another_one_s_name_is_no_second_process_of_that_one(here: Place) -> None:
    one, two = join(here, "pi-1"), join(here, "pi-2")
    polled(here.fleet, ClientConnected, lambda joined: joined.device == "pi-2")
    rename(here, pi_1="lab-1", pi_2="pi-1")
    two.pull(0.0)
    one.pull(0.0)
    here.fleet.send([envelope("pi-1", "assignment-2"), envelope("lab-1", "assignment-1")])
    assert [pulled(link).assignment.assignment_id for link in (one, two)] == ["assignment-1", "assignment-2"]
