from __future__ import annotations

import errno
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import BadPayload, DataLost, NotWritten, ReplyLost
from thinwire.core.serialization import reply_to_bytes
from thinwire.core.types import Part, ReplyHeader, Transfer, UpdateId
from thinwire.store import FileSpool
from thinwire.store.spool import FOLDERS_BETWEEN_CLEANUPS, HEADER_LENGTH, UNREADABLE


def reply(parts: list[bytes], device: str = "pi-01", sequence: int = 1, run: str = "digits-1") -> ReplyHeader:
    named = tuple(Part(f"frame/{i}", len(p), hashlib.sha256(p).hexdigest()) for i, p in enumerate(parts))
    return ReplyHeader(
        "assignment", UpdateId(run, device, sequence), 0, 10, 5, 5.0, 1.0, parts=named, transfer=Transfer(1.0)
    )


def put(spool: FileSpool, header: ReplyHeader, parts: list[bytes]) -> None:
    draft = spool.draft(header.update_id)
    draft.write_bytes(b"".join(parts))
    spool.commit(draft, header)


@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.binary(max_size=300), max_size=5))
def test_what_was_committed_comes_back_part_by_part_also_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    header = reply(parts)
    put(FileSpool(folder), header, parts)
    again = FileSpool(folder)
    assert list(again.open(header.update_id)) == parts
    assert (again.header(header.update_id), again.headers()) == (header, [header])


def test_heads_come_in_the_order_of_arrival_also_after_a_restart(tmp_path: Path) -> None:
    spool, order = FileSpool(tmp_path), [("b", 2), ("a", 10), ("a", 9), ("c", 1)]
    for nth, (device, sequence) in enumerate(order):
        header = reply([b"x"], device, sequence)
        put(spool, header, [b"x"])
        os.utime(spool.path(header.update_id), ns=(nth, nth))  # a coarse disk clock must not decide
    for one in (spool, FileSpool(tmp_path)):
        assert [(h.update_id.device, h.update_id.sequence) for h in one.headers()] == order


def test_the_order_of_arrival_outlives_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [("b", 2), ("a", 10), ("c", 1)]
    for nth, (device, sequence) in enumerate(order):
        monkeypatch.setattr(time, "time_ns", lambda nth=nth: 10**18 - nth * 10**9)
        put(FileSpool(tmp_path), reply([b"x"], device, sequence), [b"x"])
    assert [(h.update_id.device, h.update_id.sequence) for h in FileSpool(tmp_path).headers()] == order


def test_a_draft_is_not_visible_and_does_not_outlive_a_restart(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    first, second = spool.draft(header.update_id), spool.draft(header.update_id)
    assert first != second
    first.write_bytes(b"ab")
    assert (spool.header(header.update_id), spool.headers()) == (None, [])
    assert FileSpool(tmp_path).headers() == []
    assert not first.exists()


def test_a_draft_with_its_header_is_the_rest_of_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    with monkeypatch.context() as crash, pytest.raises(KeyboardInterrupt):
        crash.setattr("os.replace", Mock(side_effect=KeyboardInterrupt))
        put(spool, header, [b"abc"])
    (draft,) = tmp_path.glob("*/*")
    assert draft.stat().st_size > 3
    assert FileSpool(tmp_path).headers() == []
    assert not draft.exists()


def test_a_draft_whose_header_the_disk_did_not_take_is_committed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    draft = spool.draft(header.update_id)
    draft.write_bytes(b"abc")
    with monkeypatch.context() as full, pytest.raises(DataLost):
        full.setattr("os.fsync", Mock(side_effect=OSError(errno.EIO, "input/output error")))
        spool.commit(draft, header)
    assert draft.read_bytes() == b"abc"
    spool.commit(draft, header)
    assert list(FileSpool(tmp_path).open(header.update_id)) == [b"abc"]


def test_a_second_commit_of_the_same_update_leaves_the_first(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path)
    put(spool, reply([b"first"]), [b"first"])
    put(spool, reply([b"other"]), [b"other"])
    assert list(spool.open(UpdateId("digits-1", "pi-01", 1))) == [b"first"]
    assert [path.name for path in sorted(tmp_path.glob("*/*"))] == ["pi-01-1.reply"]


def test_a_body_of_another_length_than_its_header_says_is_refused(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    with pytest.raises(BadPayload, match="4 bytes"):
        put(spool, header, [b"abcd"])
    assert spool.headers() == []


def test_deleting_forgets_and_may_be_repeated(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    put(spool, header, [b"abc"])
    spool.delete(header.update_id)
    spool.delete(header.update_id)
    spool.delete(UpdateId("never", "seen", 1))
    assert (spool.headers(), list(tmp_path.glob("*/*"))) == ([], [])
    with pytest.raises(DataLost):
        spool.open(header.update_id)
    put(spool, header, [b"abc"])
    assert spool.headers() == [header]


def test_a_file_that_was_cut_is_data_lost(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc", b"defg"])
    put(spool, header, [b"abc", b"defg"])
    os.truncate(spool.path(header.update_id), 5)
    parts = spool.open(header.update_id)
    assert next(parts) == b"abc"
    with pytest.raises(DataLost, match="cut short"):
        next(parts)


@pytest.mark.parametrize("damage", ["header", "length", "parts", "another"])
def test_a_reply_that_is_not_readable_is_set_aside_and_the_others_are_there(tmp_path: Path, damage: str) -> None:
    spool, sound = FileSpool(tmp_path), reply([b"abc"], sequence=2)
    for header in (reply([b"abc"]), sound):
        put(spool, header, [b"abc"])
    path = spool.path(reply([b"abc"]).update_id)
    match damage:
        case "header":
            path.write_bytes(b"abc{" + HEADER_LENGTH.pack(1))
        case "length":
            path.write_bytes(b"abc{}" + HEADER_LENGTH.pack(2**40))
        case "parts":
            os.truncate(path, 1)
        case _:
            other = reply_to_bytes(reply([b"abc"], device="pi-02"))
            path.write_bytes(b"abc" + other + HEADER_LENGTH.pack(len(other)))
    before = path.read_bytes()
    assert FileSpool(tmp_path).headers() == [sound]
    aside = tmp_path / UNREADABLE / "digits-1" / path.name
    assert aside.read_bytes() == before
    put(again := FileSpool(tmp_path), reply([b"abc"]), [b"abc"])
    assert len(again.headers()) == 2, "it may come again"
    path.write_bytes(b"[")
    assert FileSpool(tmp_path).headers() == [sound]
    assert aside.read_bytes() == before, "what was set aside first stays"


def test_parts_that_are_not_readable_in_service_are_set_aside(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    put(spool, header, [b"abc"])
    os.truncate(spool.path(header.update_id), 1)
    with pytest.raises(BadPayload):
        list(spool.open(header.update_id))
    assert spool.headers() == []
    assert (tmp_path / UNREADABLE / "digits-1" / "pi-01-1.reply").exists()


def test_two_devices_whose_names_end_in_numbers_do_not_share_a_file(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path)
    a, b = UpdateId("r", "pi-1", 11), UpdateId("r", "pi-1-1", 1)
    assert spool.path(a) != spool.path(b)


def test_a_disk_that_is_not_writable_is_data_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataLost):
        FileSpool(tmp_path / "file" / "spool")
    spool = FileSpool(tmp_path / "spool")
    (tmp_path / "spool" / "digits-1").write_text("in the way")
    with pytest.raises(DataLost):
        spool.draft(UpdateId("digits-1", "pi-01", 1))


def test_of_many_commits_of_one_update_at_once_one_stays_whole(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path)
    bodies = [bytes([n]) * 1000 for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda body: put(spool, reply([body]), [body]), bodies))
    (header,) = FileSpool(tmp_path).headers()
    (body,) = spool.open(header.update_id)
    assert hashlib.sha256(body).hexdigest() == header.parts[0].sha256
    assert spool.headers() == [header]


def test_made_up_runs_leave_no_folders_behind(tmp_path: Path) -> None:
    spool, kept = FileSpool(tmp_path), reply([b"x"], run="digits-1")
    put(spool, kept, [b"x"])
    for nth in range(3 * FOLDERS_BETWEEN_CLEANUPS):
        header = reply([b"y"], run=f"made-up-{nth}")
        put(spool, header, [b"y"])
        spool.delete(header.update_id)
    assert len(list(tmp_path.iterdir())) <= FOLDERS_BETWEEN_CLEANUPS + 1
    again = FileSpool(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["digits-1"]
    assert list(again.open(kept.update_id)) == [b"x"]


def test_a_folder_that_goes_while_an_answer_comes_is_made_again(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    put(spool, header, [b"abc"])
    spool.delete(header.update_id)
    (tmp_path / "digits-1").rmdir()
    put(spool, header, [b"abc"])
    assert list(spool.open(header.update_id)) == [b"abc"]


def test_a_spool_for_one_process_gives_what_was_committed_and_leaves_nothing_to_a_next_one(tmp_path: Path) -> None:
    spool, header = FileSpool(tmp_path, durable=False), reply([b"abc", b"d"])
    put(spool, header, [b"abc", b"d"])
    assert (spool.headers(), list(spool.open(header.update_id))) == ([header], [b"abc", b"d"])
    assert FileSpool(tmp_path).headers() == []
    spool.delete(header.update_id)
    assert not spool.path(header.update_id).exists()


def test_what_a_run_left_unfinished_or_unreadable_is_removed_and_nothing_else(tmp_path: Path) -> None:
    spool, whole, damaged = FileSpool(tmp_path), reply([b"whole"]), reply([b"damaged"], sequence=2)
    other = reply([b"other"], run="digits-2")
    for header, body in ((whole, b"whole"), (damaged, b"damaged"), (other, b"other")):
        put(spool, header, [body])
    spool.path(damaged.update_id).write_bytes(b"")
    with pytest.raises(ReplyLost):
        list(spool.open(damaged.update_id))
    unfinished = [spool.partial(reply([b"z"], sequence=nth).update_id, "ab" * 32) for nth in (7, 8)]
    others = spool.partial(reply([b"z"], run="digits-2", sequence=7).update_id, "ab" * 32)
    spool.drop_unused("digits-1", but=unfinished[1:])
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left - {others, unfinished[1]} == {spool.path(one.update_id) for one in (whole, other)}
    assert others in left
    assert unfinished[0] not in left


@pytest.mark.parametrize("missing", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_with_too_many_open_files_damages_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    spool, header = FileSpool(tmp_path), reply([b"abc"])
    put(spool, header, [b"abc"])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=OSError(missing, os.strerror(missing))))
        with pytest.raises(NotWritten, match="cannot open"):
            list(spool.open(header.update_id))
        with pytest.raises(NotWritten):
            FileSpool(tmp_path)
    assert list(spool.open(header.update_id)) == [b"abc"]
    assert not list((tmp_path / UNREADABLE).glob("*"))
