"""What is cut on the way goes on from there: same bytes, at most 1 MiB sent twice a cut, both ways, through TLS too."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from benchmarks.processes import free_port
from tests.support.fleet_words import PATIENCE_S, answer, hello, polled
from tests.support.proxy import Proxy, proxy
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import NotAccepted, ReplyUnreadable, Unreachable
from thinwire.core.fleet import ClientConnected, Delivery, Envelope, FixedLimits
from thinwire.core.serialization import ReplyLimit
from thinwire.core.types import Assignment, Failure, Part, ReplyHeader, UpdateId
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.device.transfers import MAX_FRUITLESS, Outgoing
from thinwire.transport.protocol.http import INLINE_BYTES

SIZE = 12 * 2**20
CUTS = 20
SENT_TWICE = 2**20  # at most, for each cut
BESIDE = 1.02  # requests, heads and TLS records around the bytes themselves
PLAIN_AND_TLS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


def file_of(path: Path, seed: int, size: int = SIZE) -> Path:
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


def parts_of(path: Path, *lengths: int) -> tuple[Part, ...]:
    parts = []
    with open(path, "rb") as file:
        for index, length in enumerate(lengths):
            parts.append(Part(f"full/{index}", length, hashlib.sha256(file.read(length)).hexdigest()))
    return tuple(parts)


def in_parts(path: Path) -> tuple[Part, ...]:
    """Seven unequal ones, two of them empty."""
    size = path.stat().st_size
    return parts_of(path, size // 2, 0, size // 4, 1, size // 8, size - size // 2 - size // 4 - size // 8 - 1, 0)


def cut_at(seed: int, size: int = SIZE) -> list[int]:
    drawn = random.Random(seed)
    return sorted(drawn.sample(range(1000, size), CUTS))


def assignment_of(path: Path, assignment_id: str = "assignment-1") -> Envelope:
    return Envelope("pi-1", Assignment(assignment_id, "digits-1", "digits", "train", {}, parts=in_parts(path)), path)


def header_of(path: Path, sequence: int = 1) -> ReplyHeader:
    return ReplyHeader("assignment-1", UpdateId("digits-1", "pi-1", sequence), 0, 1, parts=in_parts(path))


def through(here: Place, line: Proxy, name: str = "pi-1") -> HttpsLink:
    """A device behind this line that has said hello; on a TLS device API it joined before."""
    link = here.link(name)
    link.close()
    here.api = line.address
    link = here.link(name)
    link.hello(hello(name))
    return link


def pulled(link: HttpsLink) -> Delivery:
    """Tried as the client's service does it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if (delivery := link.pull(1.0)) is not None:
                return delivery
        except Unreachable:
            time.sleep(0.01)
    raise AssertionError("no assignment came")


def pushed(link: HttpsLink, header: ReplyHeader, bundle: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            return link.push(header, bundle)
        except Unreachable:
            time.sleep(0.01)
    raise AssertionError("it could not be pushed")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


@PLAIN_AND_TLS
def test_a_download_cut_twenty_times_brings_the_same_bytes(tmp_path: Path, tls: bool) -> None:
    seed = 1 + tls
    model = file_of(tmp_path / "model", seed)
    with place(tmp_path, tls=tls) as here, proxy(here.fleet.address) as line:
        link = through(here, line)
        line.down.cuts = [line.down.given + at for at in cut_at(seed)]
        before = line.down.given
        here.fleet.send([assignment_of(model)])
        delivery = pulled(link)
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == model.read_bytes()
        assert line.cut_count == CUTS
        assert line.down.taken - before <= SIZE * BESIDE + CUTS * SENT_TWICE


@PLAIN_AND_TLS
def test_an_upload_cut_twenty_times_brings_the_same_bytes(tmp_path: Path, tls: bool) -> None:
    seed = 3 + tls
    update = file_of(tmp_path / "update", seed)
    with place(tmp_path, tls=tls) as here, proxy(here.fleet.address) as line:
        link, header = through(here, line), header_of(update)
        line.up.cuts = [line.up.given + at for at in cut_at(seed)]
        before = line.up.given
        pushed(link, header, update)
        assert polled(here.fleet, ReplyHeader).update_id == header.update_id
        assert here.spool.path(header.update_id).read_bytes() == update.read_bytes()
        assert line.cut_count == CUTS
        assert line.up.taken - before <= SIZE * BESIDE + CUTS * SENT_TWICE


def test_an_upload_goes_on_after_the_aggregator_was_restarted(
    here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much a restart costs depends on what the aggregator had read by then; that it goes on does not."""
    update, begun, put = file_of(tmp_path / "update", 5), list[int](), Outgoing._put

    def noted(self: Outgoing, header: ReplyHeader, index: int, offset: int, bundle: Path) -> dict[str, Any]:
        begun.append(sum(part.length for part in header.parts[:index]) + offset)
        return put(self, header, index, offset, bundle)

    monkeypatch.setattr(Outgoing, "_put", noted)
    with proxy(here.fleet.address) as line:
        link, header = through(here, line), header_of(update)
        line.up.cuts = [line.up.given + SIZE // 2]
        thread = threading.Thread(target=pushed, args=(link, header, update))
        thread.start()
        while not line.cut_count:
            time.sleep(0.001)
        here.restart()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert here.spool.path(header.update_id).read_bytes() == update.read_bytes()
    assert begun[0] == 0
    assert all(begun[1:]), "nothing begins from the start again"
    assert begun == sorted(begun)


def test_an_upload_to_an_aggregator_that_is_gone_is_left_to_the_backoff_of_the_caller(
    here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, asked, durable = file_of(tmp_path / "update", 8), list[int](), Outgoing._stored_offsets
    with proxy(here.fleet.address) as line:
        link, header = through(here, line), header_of(update)

        def gone(self: Outgoing, *given: Any) -> list[int]:
            asked.append(1)
            line.target = ("127.0.0.1", free_port())  # nobody listens there
            return durable(self, *given)

        monkeypatch.setattr(Outgoing, "_stored_offsets", gone)
        line.up.cuts = [line.up.given + SIZE // 2]
        with pytest.raises(Unreachable):
            link.push(header, update)
    assert 1 <= len(asked) <= MAX_FRUITLESS


def test_a_download_goes_on_in_a_new_process(here: Place, tmp_path: Path) -> None:
    """The first process is gone with the cut; the second one finds what had come."""
    model = file_of(tmp_path / "model", 6)
    with proxy(here.fleet.address) as line:
        link = through(here, line)
        here.fleet.send([assignment_of(model)])
        line.down.cuts = [line.down.given + SIZE // 2, line.down.given + SIZE // 2 + 1]
        with pytest.raises(Unreachable):
            link.pull(5.0)
        link.close()
        kept = here.links[-1]._incoming.size(in_parts(model))
        assert 0 < kept < SIZE
        second, before = through(here, line), line.down.given
        delivery = pulled(second)
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == model.read_bytes()
        assert line.down.given - before <= (SIZE - kept) * BESIDE + 100_000, "what was kept is not sent again"


def test_what_was_whole_in_a_process_that_was_killed_is_not_sent_again(here: Place, tmp_path: Path) -> None:
    model = file_of(tmp_path / "model", 7)
    with proxy(here.fleet.address) as line:
        first = through(here, line)
        here.fleet.send([assignment_of(model)])
        assert pulled(first).bundle is not None
        first.close()
        before = line.down.taken
        delivery = pulled(through(here, line))
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == model.read_bytes()
        assert line.down.taken - before < 100_000


@pytest.mark.parametrize("damage", ["the beginning", "the end"])
def test_a_damaged_beginning_is_fetched_again_and_what_fits_is_kept(here: Place, tmp_path: Path, damage: str) -> None:
    model, downloads = file_of(tmp_path / "model", 8), tmp_path / "clients" / "pi-1" / "downloads"
    with proxy(here.fleet.address) as line:
        link = through(here, line)
        here.fleet.send([assignment_of(model)])
        line.down.cuts = [line.down.given + SIZE * 7 // 8, line.down.given + SIZE * 7 // 8 + 1]
        with pytest.raises(Unreachable):
            link.pull(5.0)
        link.close()
        (partial,) = downloads.iterdir()
        with open(partial, "r+b") as file:
            file.seek(100 if damage == "the beginning" else SIZE * 5 // 8)
            file.write(b"damaged")
        before = line.down.taken
        delivery = pulled(through(here, line))
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == model.read_bytes()
        again = SIZE if damage == "the beginning" else SIZE // 2
        assert again * 0.9 < line.down.taken - before <= again * BESIDE + SENT_TWICE


def test_a_download_of_another_bundle_under_the_same_assignment_begins_again(here: Place, tmp_path: Path) -> None:
    """As after an aggregator that was set back: the tag says that what is here is of something else."""
    old, new = file_of(tmp_path / "old", 9), file_of(tmp_path / "new", 10)
    with proxy(here.fleet.address) as line:
        link = through(here, line)
        here.fleet.send([assignment_of(old)])
        line.down.cuts = [line.down.given + SIZE // 2, line.down.given + SIZE // 2 + 1]
        with pytest.raises(Unreachable):
            link.pull(5.0)
        here.fleet.cancel(["assignment-1"])
        here.fleet.send([assignment_of(new)])
        delivery = pulled(link)
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == new.read_bytes()


def test_a_cancelled_assignment_ends_its_download(here: Place, tmp_path: Path) -> None:
    model = file_of(tmp_path / "model", 11)
    with proxy(here.fleet.address, bytes_per_s=1e6) as line:  # the whole of it would take 12 seconds
        link = through(here, line)
        here.fleet.send([assignment_of(model)])
        ended = list[Delivery | None]()
        thread = threading.Thread(target=lambda: ended.append(link.pull(5.0)))
        thread.start()
        while line.down.given < 200_000:
            time.sleep(0.001)
        here.fleet.cancel(["assignment-1"])
        thread.join(PATIENCE_S)
        assert ended == [None]
        assert line.down.given < SIZE / 2


def test_beginnings_of_downloads_do_not_pile_up(here: Place, tmp_path: Path) -> None:
    link = here.link("pi-1")
    folder = tmp_path / "clients" / "pi-1" / "downloads"
    for at in range(9):
        (folder / f"{at:064x}").write_bytes(b"x")
    link.close()
    here.link("pi-1")
    assert len(list(folder.iterdir())) == 4


def test_an_answer_that_is_damaged_on_the_devices_disk_is_not_sent_for_ever(here: Place, tmp_path: Path) -> None:
    update = file_of(tmp_path / "update", 12, 2 * INLINE_BYTES)
    header = header_of(update)
    update.write_bytes(update.read_bytes()[:-9] + b"damaged..")
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    with pytest.raises(ReplyUnreadable, match="damaged on this disk"):
        link.push(header, update)


@pytest.mark.parametrize("size", [900, 2 * INLINE_BYTES])
@pytest.mark.parametrize("lost", ["before", "during"])
def test_an_answer_that_the_disk_has_lost_is_no_outage(
    here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, lost: str
) -> None:
    """`NotAccepted` is not tried again, and no hint about an aggregator is given."""
    update = file_of(tmp_path / "update", 17, size)
    header = header_of(update)
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    if lost == "before":
        update.unlink()
    elif size > INLINE_BYTES:
        push = Outgoing._push_header

        def pushed_and_lost(self: Outgoing, header_bytes: bytes, header: ReplyHeader) -> list[int]:
            update.unlink()
            return push(self, header_bytes, header)

        monkeypatch.setattr(Outgoing, "_push_header", pushed_and_lost)
    else:

        def unreadable(path: Path) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(Path, "read_bytes", unreadable)
    with pytest.raises(NotAccepted, match="cannot read") as refused:
        link.push(header, update)
    assert isinstance(refused.value, ReplyUnreadable)


def test_an_answer_that_is_too_large_is_said_to_be_so_once(tmp_path: Path) -> None:
    update = file_of(tmp_path / "update", 13, 2 * INLINE_BYTES)
    with place(tmp_path, limits=FixedLimits(ReplyLimit(INLINE_BYTES)), tls=True) as here:
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        polled(here.fleet, ClientConnected)
        here.fleet.send([Envelope("pi-1", Assignment("assignment-1", "digits-1", "digits", "train", {}))])
        assert link.pull(0.0) is not None
        with pytest.raises(NotAccepted):
            link.push(header_of(update), update)
        assert polled(here.fleet, Failure).kind == "protocol"
        assert link._in_flight.ids() == [], "the aggregator has recorded the assignment as failed"


@PLAIN_AND_TLS
def test_an_answer_to_another_run_of_the_same_id_is_refused_and_costs_the_device_nothing_else(
    tmp_path: Path, tls: bool
) -> None:
    update = file_of(tmp_path / "update", 16, 900)
    with place(tmp_path, limits=FixedLimits(ReplyLimit(INLINE_BYTES, identity="b" * 16)), tls=tls) as here:
        link = here.link("pi-1")
        here.roster.identities = {"digits-1": "b" * 16, "digits-2": "a" * 16}  # or the device would send none of it
        link.hello(hello("pi-1"))
        polled(here.fleet, ClientConnected)
        here.fleet.send([Envelope("pi-1", Assignment("assignment-1", "digits-1", "digits", "train", {}))])
        assert link.pull(0.0) is not None
        for identity in ("", "a" * 16):
            with pytest.raises(NotAccepted, match="another run"):
                link.push(dataclasses.replace(header_of(update), identity=identity), update)
            with pytest.raises(NotAccepted, match="another run"):
                link.push(Failure("task-error", "", "assignment-1", "pi-1", identity=identity))
        assert (here.spool.headers(), here.fleet.poll(0.0)) == ([], []), "the assignment goes on"
        link.push(dataclasses.replace(header_of(update), identity="b" * 16), update)
        assert [header.identity for header in here.spool.headers()] == ["b" * 16]


@pytest.mark.parametrize("size", [INLINE_BYTES, INLINE_BYTES + 1])
@PLAIN_AND_TLS
def test_around_the_limit_of_what_travels_inline_both_ways_work(tmp_path: Path, tls: bool, size: int) -> None:
    model, update = file_of(tmp_path / "model", 14, size), file_of(tmp_path / "update", 15, size)
    with place(tmp_path, tls=tls) as here:
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        polled(here.fleet, ClientConnected)
        here.fleet.send([assignment_of(model)])
        delivery = pulled(link)
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == model.read_bytes()
        link.push(header_of(update), update)
        link.push(header_of(update), update)
        assert polled(here.fleet, ReplyHeader).payload_bytes == size
        assert here.spool.path(header_of(update).update_id).read_bytes() == update.read_bytes()
        assert answer("pi-1", "assignment-1").update_id == header_of(update).update_id


def test_a_large_assignment_that_is_not_wanted_comes_without_its_parts_and_nothing_of_them_is_sent(
    tmp_path: Path,
) -> None:
    """A device that will decline pays for no model; what it holds it may still decline, and be selected again."""
    unwanted = {"assignment-1"}
    with place(tmp_path) as here:
        link = here.link("pi-1", is_wanted=lambda assignment: assignment.assignment_id not in unwanted)
        link.hello(hello("pi-1"))
        large = assignment_of(file_of(tmp_path / "model", 3))
        here.fleet.send([large])
        assert pulled(link) == Delivery(large.assignment, None, ANY, device="pi-1")
        assert here.fleet.stats()["sent_bytes"] < INLINE_BYTES
        link.push(Failure("declined", "metered: this link is paid by volume", "assignment-1"))
        polled(here.fleet, Failure)
        unwanted.clear()
        here.fleet.send([large])
        delivery = pulled(link)
        assert delivery.bundle is not None
        assert delivery.bundle.stat().st_size == SIZE
