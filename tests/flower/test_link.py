"""A device's end against a real door: large bodies, lost connections, restarts, and who counts as there."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleet_laws import PATIENCE_S, answer, answers_now, envelope, hello, join, polled, pulled, until, written
from tests.flower.doubles import Place, place
from thinwire.core.errors import BadPayload, DataLost, Refused, Unreachable, UsageError
from thinwire.core.fleet import Delivery, Envelope, Link, NodeJoined, NodeLeft
from thinwire.core.types import Ask, Failure, Part, ReplyHead
from thinwire.flower import FlowerLink, device_key

BIG = 30_000_000


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def big_file(path: Path, seed: int) -> Path:
    block = hashlib.shake_128(bytes([seed])).digest(1_000_000)
    with open(path, "wb") as file:
        file.writelines(block for _ in range(BIG // len(block)))
    return path


def parts_of(path: Path, count: int) -> tuple[Part, ...]:
    size = BIG // count
    with open(path, "rb") as file:
        return tuple(Part(f"full/{i}", size, hashlib.sha256(file.read(size)).hexdigest()) for i in range(count))


def test_large_bodies_stream_both_ways_in_bounded_memory(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    model, update = big_file(tmp_path / "model", 1), big_file(tmp_path / "update", 2)
    ask = Ask("ask-1", "digits-1", "digits", "train", {}, parts=parts_of(model, 3))
    head = answer("pi-1", "ask-1")
    head = ReplyHead(head.ask_id, head.update_id, 0, 1, parts=parts_of(update, 5))
    tracemalloc.start()
    try:
        here.fleet.send([Envelope("pi-1", ask, model)])
        delivery = pulled(link)
        link.push(head, update)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BIG / 2  # both ends run here
    assert delivery.bundle is not None
    assert _digest(delivery.bundle) == _digest(model)
    assert delivery.download_s > 0
    assert polled(here.fleet, ReplyHead).payload_bytes == BIG
    assert _digest(here.spool.path(head.update_id)) == _digest(update)


def test_a_large_answer_that_is_refused_early_says_why(here: Place, tmp_path: Path) -> None:
    """The device is still sending when the answer comes."""
    link = join(here, "pi-1")
    update = big_file(tmp_path / "update", 2)
    here.roster.put("pi-1", "revoked")
    head = ReplyHead("ask-1", answer("pi-1", "x").update_id, 0, 1, parts=parts_of(update, 1))
    with pytest.raises(Refused) as refused:
        link.push(head, update)
    assert "revoked" in refused.value.why


def test_a_large_answer_that_is_here_already_is_not_sent_twice(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    update = big_file(tmp_path / "update", 2)
    head = ReplyHead("ask-1", answer("pi-1", "x").update_id, 0, 1, parts=parts_of(update, 1))
    link.push(head, update)
    link.push(head, update)
    assert len(answers_now(here.fleet)) == 1
    assert not here.spool.drafts()


def test_a_damaged_download_is_not_delivered(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    sent = envelope("pi-1", "ask-1", tmp_path, b"model")
    here.fleet.send([sent])
    assert sent.bundle is not None
    sent.bundle.write_bytes(b"mode!")
    with pytest.raises(Unreachable, match="damaged"):
        link.pull(1.0)
    assert not list((here.folder / "clients" / "pi-1" / "downloads").iterdir())
    sent.bundle.write_bytes(b"model")
    assert pulled(link).bundle is not None


def test_a_bundle_that_is_not_what_its_ask_says_is_not_sent(here: Place, tmp_path: Path) -> None:
    join(here, "pi-1")
    sent = envelope("pi-1", "ask-1", tmp_path, b"model")
    assert sent.bundle is not None
    sent.bundle.write_bytes(b"mode")
    with pytest.raises(DataLost):
        here.fleet.send([sent])


def test_an_answer_without_its_parts_is_not_sent(here: Place) -> None:
    with pytest.raises(BadPayload):
        join(here, "pi-1").push(answer("pi-1", "ask-1", 1, b"abc"))


def test_a_push_outlives_an_idle_connection_that_was_closed(here: Place, tmp_path: Path) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    link.push(answer("pi-1", "ask-1", 1, b"abc"), written(tmp_path, b"abc"))
    made = link._pushing._line
    assert made is not None
    made.hang_up()
    link.push(answer("pi-1", "ask-2", 2, b"abc"), written(tmp_path, b"abc"))
    assert len(here.spool.heads()) == 2


def test_an_aggregator_that_is_not_there_is_said_at_once(here: Place) -> None:
    link = join(here, "pi-1")
    here.fleet.close()
    with pytest.raises(Unreachable, match="cannot reach the aggregator at http://127.0.0.1:") as refused:
        link.pull(20.0)
    with pytest.raises(Unreachable):
        link.push(Failure("task-error", "x", "ask-1"))
    assert refused.value.exit_code == 4
    assert "thinwire aggregator start" in refused.value.hint


def test_a_waiting_pull_outlives_a_restart_of_the_aggregator(here: Place) -> None:
    """The client's service tries again; the link says hello by itself."""
    link, got = join(here, "pi-1"), list[Delivery]()

    def client() -> None:
        while not got:
            try:
                if (delivery := link.pull(20.0)) is not None:
                    got.append(delivery)
            except Unreachable:
                time.sleep(0.02)

    polled(here.fleet, NodeJoined)
    thread = threading.Thread(target=client)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 0)
    here.restart()
    polled(here.fleet, NodeJoined)
    here.fleet.send([envelope("pi-1", "ask-1")])
    thread.join(PATIENCE_S)
    assert [delivery.ask.ask_id for delivery in got] == ["ask-1"]


def test_a_closed_link_ends_a_pull_that_waits(here: Place) -> None:
    link, ended = join(here, "pi-1"), list[BaseException]()

    def wait() -> None:
        try:
            link.pull(20.0)
        except Unreachable as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 0)
    link.close()
    thread.join(5)
    assert len(ended) == 1
    assert polled(here.fleet, NodeLeft).why == "its connection is closed"


def test_a_cancel_reaches_a_device_that_is_waiting(here: Place) -> None:
    link = join(here, "pi-1")
    here.fleet.send([envelope("pi-1", "ask-1")])
    pulled(link)
    thread = threading.Thread(target=link.pull, args=(20.0,))
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 1)
    here.fleet.cancel(["ask-1"])
    thread.join(PATIENCE_S)
    assert link.cancelled() == {"ask-1"}


def test_a_device_that_is_revoked_while_it_waits_gets_nothing(here: Place) -> None:
    link, ended = join(here, "pi-1"), list[str]()

    def wait() -> None:
        try:
            link.pull(20.0)
        except Refused as refused:
            ended.append(refused.why)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 0)
    here.roster.put("pi-1", "revoked")
    here.fleet.send([envelope("pi-1", "ask-1")])
    thread.join(PATIENCE_S)
    assert ended == ["pi-1 was revoked"]


def test_an_ask_whose_model_is_gone_fails(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    sent = envelope("pi-1", "ask-1", tmp_path, b"model")
    here.fleet.send([sent])
    assert sent.bundle is not None
    sent.bundle.unlink()
    assert link.pull(0.0) is None
    failure = polled(here.fleet, Failure)
    assert (failure.kind, failure.ask_id, failure.device) == ("disk", "ask-1", "pi-1")


def test_a_device_that_waits_has_not_left(tmp_path: Path) -> None:
    with place(tmp_path, grace_s=0.05, poll_s=0.3) as here:
        link = join(here, "pi-1")
        polled(here.fleet, NodeJoined)
        for _ in range(3):
            link.pull(5.0)
        assert list(here.fleet.poll(0.0)) == []
        assert "has not called" in polled(here.fleet, NodeLeft).why  # its connection is open, and it is silent
        link.pull(0.0)
        assert polled(here.fleet, NodeJoined).device == "pi-1"


def test_a_device_that_comes_back_within_the_grace_has_not_left(tmp_path: Path) -> None:
    with place(tmp_path, grace_s=30.0) as here:
        join(here, "pi-1").close()
        join(here, "pi-1")
        assert {type(arrival) for arrival in here.fleet.poll(0.1)} == {NodeJoined}


def test_flowers_registry_knows_who_is_online(here: Place) -> None:
    state = here.fleet._superlink.state

    def online() -> list[str]:
        return [node.name for node in state.get_node_info(statuses=["online"])]

    link = join(here, "pi-1")
    assert online() == ["pi-1"]
    link.close()
    polled(here.fleet, NodeLeft)
    assert online() == []


def test_an_ask_to_nobody_fails_at_once(here: Place) -> None:
    here.fleet.send([envelope("nobody", "ask-1")])
    failure = polled(here.fleet, Failure)
    assert (failure.kind, failure.ask_id, failure.device) == ("left", "ask-1", "nobody")


def test_a_stop_is_given_once_and_needs_no_answer(here: Place) -> None:
    link = join(here, "pi-1")
    here.fleet.send([Envelope("pi-1", Ask("stop-1", "digits-1", "digits", "stop", ""))])
    assert pulled(link).ask.kind == "stop"
    link.pull(0.0)
    link.close()
    assert join(here, "pi-1").pull(0.1) is None


def test_a_link_speaks_for_its_own_name_only(here: Place) -> None:
    with pytest.raises(Refused):
        here.link("pi-1").hello(hello("pi-2"))


def test_a_pull_before_a_hello_is_refused(here: Place) -> None:
    with pytest.raises(Unreachable, match="hello"):
        here.link("pi-1").pull(0.0)


@pytest.mark.parametrize("url", ["https://127.0.0.1:9090", "ftp://x", "http://", "http://x:port", "http://10.0.0.1"])
def test_an_address_that_cannot_be_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        FlowerLink(url, device_key(tmp_path), "pi-1", tmp_path)


def test_a_device_needs_neither_flwr_nor_torch_nor_a_database() -> None:
    code = (
        "import sys; from thinwire.flower import FlowerLink, device_key\n"
        "print([m for m in ('flwr', 'torch', 'sqlalchemy', 'fastapi', 'uvicorn', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_aggregator_needs_no_torch() -> None:
    code = "import sys; from thinwire.flower import FlowerFleet; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_hundreds_wait_and_all_are_woken(here: Place) -> None:
    """The links wait in threads; the door needs none for them."""
    links = [join(here, f"pi-{i}") for i in range(100)]
    got: list[str] = []

    def wait(link: Link) -> None:
        got.append(pulled(link).ask.ask_id)

    threads = [threading.Thread(target=wait, args=(link,)) for link in links]
    before = threading.active_count()
    for thread in threads:
        thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] >= 100)
    assert threading.active_count() <= before + 100
    here.fleet.send([envelope(f"pi-{i}", f"ask-{i}") for i in range(100)])
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(got) == sorted(f"ask-{i}" for i in range(100))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_a_device_tells_what_it_has_become_while_a_pull_waits(here: Place) -> None:
    """`client reload`: the pull that waits goes on, and gets the ask that comes then."""
    link, said = here.link("pi-1"), hello("pi-1")
    link.hello(said)
    polled(here.fleet, NodeJoined)
    got: list[Delivery | None] = []
    waiting = threading.Thread(target=lambda: got.append(link.pull(PATIENCE_S)))
    waiting.start()
    until(lambda: (session := here.fleet._sessions.of("pi-1")) and session.turn)
    link.hello(replace(said, versions={**said.versions, "task": "2.0"}))
    assert polled(here.fleet, NodeJoined).hello.versions["task"] == "2.0"
    assert got == []
    here.fleet.send([envelope("pi-1", "ask-1")])
    waiting.join(PATIENCE_S)
    assert [delivery and delivery.ask.ask_id for delivery in got] == ["ask-1"]
    link.push(Failure("declined", "", "ask-1", "pi-1"))
    assert polled(here.fleet, Failure).ask_id == "ask-1"
