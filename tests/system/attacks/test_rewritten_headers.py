"""A reply header that grows when it is written in another encoding: nothing that a device sends is encoded again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fleet_words import answer, answers_now, hello, polled
from tests.system.attacks.acting import acted
from tests.system.attacks.places import attacked, device_of
from thinwire.core import Layout
from thinwire.core.events import UpdateDropped
from thinwire.core.fleet import ClientConnected
from thinwire.core.serialization import MAX_HEADER_BYTES, reply_from_bytes, reply_to_json
from thinwire.core.types import Arrived, ReplyHeader, UpdateId
from thinwire.simulation import SyntheticUpdates
from thinwire.store import FileSpool
from thinwire.transport.protocol.http import PUSH, pack

both = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


def in_utf8(header: ReplyHeader, letters: int) -> bytes:
    """The header with so many Chinese letters in it: three bytes each as UTF-8, six as ASCII JSON."""
    drawn = np.random.default_rng(17).integers(0x4E00, 0x9FA5, letters, "<u2").tobytes().decode("utf-16-le")
    raw = reply_to_json(header) | {"codec": drawn}
    return json.dumps(raw, ensure_ascii=False).encode()


@both
@pytest.mark.parametrize("letters", [1_000_000, 40_000, 2_000])
def test_a_header_of_3_mb_of_utf8_stops_neither_the_aggregator_nor_its_next_start(
    tmp_path: Path, tls: bool, letters: int
) -> None:
    with attacked(tmp_path, tls=tls) as here:
        caller, link = device_of(here), here.link("pi-2")
        body = pack(in_utf8(answer("pi-1", "digits-1.1.pi-1", 1, b"x"), letters)) + b"x"
        status = caller.call("POST", PUSH, body).status
        assert status in (200, 409, 413)
        for _ in range(2):
            link.hello(hello("pi-2"))
            polled(here.fleet, ClientConnected, lambda joined: joined.device == "pi-2")
            here.restart()
        came = [reply for reply in answers_now(here.fleet) if isinstance(reply, ReplyHeader)]
        assert [reply.update_id.device for reply in came] == ["pi-1"] * (status == 200)


def test_the_spool_keeps_the_bytes_that_came_and_reads_them_again(tmp_path: Path) -> None:
    header = answer("pi-1", "digits-1.1.pi-1", 1, b"x")
    received = in_utf8(header, 1_300_000)
    read = reply_from_bytes(received)
    assert isinstance(read, ReplyHeader)
    spool = FileSpool(tmp_path / "spool")
    draft = spool.draft(header.update_id)
    draft.write_bytes(b"x")
    spool.commit(draft, read, received)
    assert received in spool.path(header.update_id).read_bytes()
    assert FileSpool(tmp_path / "spool").headers() == [read]


@both
@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b"[" * (MAX_HEADER_BYTES + 1)])
def test_an_unreadable_file_in_the_spool_is_set_aside_with_a_warning(
    tmp_path: Path, tls: bool, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with attacked(tmp_path, tls=tls) as here:
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        file = tmp_path / "update"
        file.write_bytes(b"x")
        damaged, sound = (answer("pi-1", f"digits-1.{nth}.pi-1", nth, b"x") for nth in (1, 2))
        link.push(damaged, file)
        link.push(sound, file)
        here.spool.path(damaged.update_id).write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            here.restart()
        came = [reply for reply in answers_now(here.fleet) if isinstance(reply, ReplyHeader)]
        assert [reply.update_id for reply in came] == [sound.update_id]
        assert sum("set aside" in record.message for record in caplog.records) == 1
        kept = [path for path in (tmp_path / "spool").rglob("*pi-1-1.reply") if path.read_bytes() == damage]
        assert len(kept) == 1, "nothing is deleted"
        link.hello(hello("pi-1"))
        link.push(replace(damaged, transfer=None), file)  # the device sends it again, and it counts
        here.restart()
        assert len([reply for reply in answers_now(here.fleet) if isinstance(reply, ReplyHeader)]) == 2
        assert sum("set aside" in record.message for record in caplog.records) == 1


@both
def test_a_reply_that_is_damaged_before_it_is_aggregated_is_dropped_and_its_run_goes_on(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = FileSpool.open

    def damaged(self: FileSpool, update_id: UpdateId) -> Iterator[Arrived]:
        if update_id == UpdateId("toy-1", "pi-2", 1) and self.path(update_id).exists():
            os.truncate(self.path(update_id), 3)
        return opened(self, update_id)

    monkeypatch.setattr(FileSpool, "open", damaged)
    layout = Layout.of({"w": (8,)})
    devices = {name: SyntheticUpdates(name, layout, 1.0) for name in ("pi-1", "pi-2")}
    run = acted(tmp_path, layout, devices, tls=tls, run={"rounds": 2}, cohort={"deadline_s": 60.0, "min_updates": 1})
    assert run.row.status == "done"
    assert [event.update_id for event in run.of(UpdateDropped)] == ["toy-1/pi-2/1"]
    assert not list(run.home.spool.rglob("*.reply")), "its run is over, so what was set aside is deleted"
