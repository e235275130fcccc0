"""An upload of which the disk lost something when the power went: no byte is used that does not fit its digest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flower import test_killed_aggregator
from tests.flower.test_killed_aggregator import Aggregator
from tests.support.fleet_words import PATIENCE_S, answer, polled
from tests.support.proxy import Proxy
from tests.support.transport_doubles import Place, place
from tests.transport.test_cuts import file_of, header_of, pushed
from tests.transport.test_uploads import BODIES, Uploader
from thinwire.core.errors import BadPayload
from thinwire.core.types import ReplyHeader
from thinwire.store import FileSpool
from thinwire.transport.device.link import HttpsLink

killed = test_killed_aggregator.killed


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, spool=lambda: FileSpool(tmp_path / "spool")) as made:
        yield made


def test_a_part_that_was_damaged_as_the_aggregator_was_killed_is_sent_again(
    killed: tuple[Aggregator, Proxy, HttpsLink], tmp_path: Path
) -> None:
    aggregator, _, link = killed
    aggregator.kill()
    assert aggregator.start("dies") == "again\n"
    update = file_of(tmp_path / "update", 2)
    thread = threading.Thread(target=pushed, args=(link, header_of(update), update))
    thread.start()
    assert aggregator.process is not None
    assert aggregator.process.wait(PATIENCE_S) == -9
    aggregator.kill()
    assert aggregator.start("again") == "again\n"
    thread.join(PATIENCE_S)
    assert aggregator.out.readline() == "came\n"
    assert (tmp_path / "came").read_bytes() == update.read_bytes()


def partial(here: Place) -> Path:
    (found,) = (here.folder / "spool").rglob(".partial-*")
    return found


@pytest.mark.parametrize("durable", [b"whole", b"cut"])
def test_what_a_file_holds_is_hashed_before_its_size_is_believed(here: Place, durable: bytes) -> None:
    device = Uploader(here)
    device.push_header()
    assert device.put(0, 0)[0] == 200
    path = partial(here)
    data = bytearray(path.read_bytes())
    data[1000:2000] = bytes(1000)
    path.write_bytes(data + (BODIES[2] if durable == b"whole" else BODIES[2][:100]))
    here.restart()
    device.hello()
    assert device.push_header() == [0, 0, 0]
    assert path.stat().st_size == 0
    assert device.put(0, 0)[0] == 200
    assert device.put(2, 0)[1]["done"]
    assert [bytes(part) for part in here.fleet.open(polled(here.fleet, ReplyHeader).update_id)] == list(BODIES)


def test_a_part_that_does_not_fit_is_not_there_any_more_after_a_restart(here: Place) -> None:
    device = Uploader(here)
    device.push_header()
    assert device.put(0, 0, b"x" * len(BODIES[0]))[1]["error"] == "damaged"
    assert partial(here).stat().st_size == 0
    here.restart()
    device.hello()
    assert device.push_header() == [0, 0, 0]


def test_what_was_damaged_after_it_was_written_is_not_committed(here: Place) -> None:
    device = Uploader(here)
    device.push_header()
    assert device.put(0, 0)[0] == 200
    with partial(here).open("r+b") as file:
        file.write(bytes(1000))
    assert device.put(2, 0)[1]["error"] == "damaged"
    assert not here.spool.headers()
    assert device.push_header() == [0, 0, 0]


def test_a_spool_commits_only_what_fits_its_header(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), answer("pi-1", "assignment-1", 1, b"abc", b"", b"def")
    draft = spool.draft(header.update_id)
    draft.write_bytes(b"abcdeg")
    with pytest.raises(BadPayload, match="frame/2"):
        spool.commit(draft, header)
    assert not spool.headers()
    draft.write_bytes(b"abcdef")
    spool.commit(draft, header)
    assert spool.headers() == [header]
