"""Large bodies between a device and a real device API: streamed, sent once, and whole or not at all."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet_words import answer, answers_now, envelope, join, polled, pulled
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import DataLost, Refused, ReplyUnreadable, Unreachable
from thinwire.core.fleet import Envelope
from thinwire.core.types import Assignment, Failure, Part, ReplyHeader

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
    assignment = Assignment("assignment-1", "digits-1", "digits", "train", {}, parts=parts_of(model, 3))
    header = answer("pi-1", "assignment-1")
    header = ReplyHeader(header.assignment_id, header.update_id, 0, 1, parts=parts_of(update, 5))
    tracemalloc.start()
    try:
        here.fleet.send([Envelope("pi-1", assignment, model)])
        delivery = pulled(link)
        link.push(header, update)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BIG / 2  # both ends run here
    assert delivery.bundle is not None
    assert _digest(delivery.bundle) == _digest(model)
    assert delivery.download_s > 0
    assert polled(here.fleet, ReplyHeader).payload_bytes == BIG
    assert _digest(here.spool.path(header.update_id)) == _digest(update)


def test_a_large_answer_that_is_refused_early_says_why(here: Place, tmp_path: Path) -> None:
    """The device is still sending when the answer comes."""
    link = join(here, "pi-1")
    update = big_file(tmp_path / "update", 2)
    here.roster.put("pi-1", "revoked")
    header = ReplyHeader("assignment-1", answer("pi-1", "x").update_id, 0, 1, parts=parts_of(update, 1))
    with pytest.raises(Refused) as refused:
        link.push(header, update)
    assert "revoked" in refused.value.why


def test_a_large_answer_that_is_here_already_is_not_sent_twice(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    update = big_file(tmp_path / "update", 2)
    header = ReplyHeader("assignment-1", answer("pi-1", "x").update_id, 0, 1, parts=parts_of(update, 1))
    link.push(header, update)
    link.push(header, update)
    assert len(answers_now(here.fleet)) == 1
    assert not here.spool.drafts()


def test_a_damaged_download_is_not_delivered(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    sent = envelope("pi-1", "assignment-1", tmp_path, b"model")
    here.fleet.send([sent])
    assert sent.bundle is not None
    sent.bundle.write_bytes(b"mode!")
    with pytest.raises(Unreachable, match="damaged"):
        link.pull(1.0)
    assert not list((here.folder / "clients" / "pi-1" / "downloads").iterdir())
    sent.bundle.write_bytes(b"model")
    assert pulled(link).bundle is not None


def test_a_bundle_that_is_not_what_its_assignment_says_is_not_sent(here: Place, tmp_path: Path) -> None:
    join(here, "pi-1")
    sent = envelope("pi-1", "assignment-1", tmp_path, b"model")
    assert sent.bundle is not None
    sent.bundle.write_bytes(b"mode")
    with pytest.raises(DataLost):
        here.fleet.send([sent])


def test_an_answer_without_its_parts_is_not_sent(here: Place) -> None:
    with pytest.raises(ReplyUnreadable):
        join(here, "pi-1").push(answer("pi-1", "assignment-1", 1, b"abc"))


def test_an_assignment_whose_model_is_gone_fails(here: Place, tmp_path: Path) -> None:
    link = join(here, "pi-1")
    sent = envelope("pi-1", "assignment-1", tmp_path, b"model")
    here.fleet.send([sent])
    assert sent.bundle is not None
    sent.bundle.unlink()
    assert link.pull(0.0) is None
    failure = polled(here.fleet, Failure)
    assert (failure.kind, failure.assignment_id, failure.device) == ("disk", "assignment-1", "pi-1")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
