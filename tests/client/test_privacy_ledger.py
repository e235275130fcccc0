"""A device's own ledger: what it says was booked is on disk, whatever kills it, and damage books nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.client import privacy_ledger
from thinwire.client.booking import Booking, DataSet
from thinwire.client.privacy_ledger import FILE, DeviceLedger
from thinwire.client.run_store import delete_learned
from thinwire.core.errors import DataLost, NotWritten, Refused
from thinwire.core.fleet import population_key

CHEAP, DEAR = '{"variance": 4.0}', '{"variance": 1.0, "note": "é }"}'
HERE = DataSet("", "/data/ward")


def booking(number: int, dataset: DataSet = HERE, **changed: Any) -> Booking:
    made = Booking(
        1000.0 + number, dataset.name, dataset.data, "ward", CHEAP if number % 3 else DEAR, "ecg-1", "beef", number,
        f"ecg-1.{number}.pi", number - 1,
    )  # fmt: skip
    return replace(made, **changed)


def booked(folder: Path, count: int, key: str = "") -> DeviceLedger:
    ledger = DeviceLedger(folder, key)
    for number in range(1, count + 1):
        ledger.book(booking(number))
    return ledger


def test_what_was_booked_is_there_for_the_next_process(tmp_path):
    ledger = booked(tmp_path, 4)
    again = DeviceLedger(tmp_path)
    assert again.bookings == ledger.bookings
    assert (again.head, again.damage, again.spent(HERE)) == (ledger.head, "", {CHEAP: 3, DEAR: 1})
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 4
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_an_assignment_that_comes_again_is_booked_once_and_its_second_reply_apart(tmp_path):
    ledger = booked(tmp_path, 1)
    ledger.book(booking(1, at=2000.0, round=1))
    DeviceLedger(tmp_path).book(booking(1))
    assert len(DeviceLedger(tmp_path).bookings) == 1
    for other in ({"sequence": 7}, {"identity": "cafe"}, {"release": DEAR}, {"data": "/elsewhere"}):
        ledger.book(booking(1, **other))
    assert len(DeviceLedger(tmp_path).bookings) == 5
    assert (ledger.sequence_of("beef", "ecg-1.1.pi"), ledger.sequence_of("beef", "none")) == (0, 0)


def test_two_tasks_on_one_folder_share_what_was_spent_also_by_a_link(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    ledger = DeviceLedger(tmp_path)
    ledger.book(booking(1, DataSet.of("", tmp_path / "data", "ecg")))
    assert ledger.spent(DataSet.of("", tmp_path / "link" / "." / ".." / "other", "mri")) == {}
    assert ledger.spent(DataSet.of("", tmp_path / "link", "mri")) == {CHEAP: 1}
    assert ledger.participations(DataSet.of("", tmp_path / "link", "mri"), "ward") == 1
    assert ledger.participations(DataSet.of("", tmp_path / "link", "mri"), "clinic") == 0


def test_a_data_set_keeps_what_it_spent_when_it_gets_a_name_and_when_it_moves(tmp_path):
    ledger = DeviceLedger(tmp_path)
    ledger.book(booking(1, DataSet("", "/old")))
    ledger.book(booking(2, DataSet("patients", "/old")))
    ledger.book(booking(4, DataSet("patients", "/new")))
    for here in (DataSet("", "/old"), DataSet("patients", "/old"), DataSet("patients", "/third")):
        assert ledger.spent(here) == {CHEAP: 3}
    assert ledger.spent(DataSet("", "/third")) == {}
    assert (ledger.participations(DataSet("", "/old"), "ward"), ledger.rounds_of("beef", DataSet("", "/new"))) == (3, 3)


def test_a_name_given_before_a_folder_moves_keeps_what_was_spent_without_a_round_in_between(tmp_path):
    """As docs/how/private-clients.md advises: the start of the client notes the name."""
    DeviceLedger(tmp_path).book(booking(1, DataSet("", "/old")))
    for called in (DataSet("ward", "/old"), DataSet("ward", "/new"), DataSet("kids", "/new")):
        DeviceLedger(tmp_path).note_dataset(called)
        lines = (tmp_path / FILE).read_bytes()
        DeviceLedger(tmp_path).note_dataset(called)
        assert (tmp_path / FILE).read_bytes() == lines, "it is noted once"
    ledger = DeviceLedger(tmp_path)
    assert (ledger.damage, len(ledger.bookings)) == ("", 1)
    assert ledger.spent(DataSet("kids", "/third")) == {CHEAP: 1}
    ledger.note_dataset(DataSet("other", "/elsewhere"))
    assert (tmp_path / FILE).read_bytes() == lines, "a data set that has spent nothing needs no line"
    ledger.book(booking(2, DataSet("kids", "/third")))
    assert DeviceLedger(tmp_path).spent(DataSet("", "/old")) == {CHEAP: 2}


def test_a_part_of_a_folder_shares_what_the_folder_has_spent(tmp_path):
    ledger = DeviceLedger(tmp_path)
    ledger.book(booking(1, DataSet("", "/data/ward")))
    for path, spent in (("/data/ward/2026", 1), ("/data", 1), ("/", 1), ("/data/ward-2", 0)):
        assert ledger.participations(DataSet("", path), "ward") == spent, path


def test_tasks_without_a_path_have_data_of_their_own(tmp_path):
    ledger = DeviceLedger(tmp_path)
    ledger.book(booking(1, DataSet.of("", None, "ecg")))
    assert ledger.spent(DataSet.of("", None, "ecg")) == {CHEAP: 1}
    assert ledger.spent(DataSet.of("", None, "mri")) == {}


def test_a_hello_reports_all_releases_by_a_hash_of_their_population_and_the_earlier_keys(tmp_path):
    """A device that joins again has a new key: its data are the same, and so is what they have spent."""
    booked(tmp_path, 3, key="before")
    assert DeviceLedger(tmp_path, "before").report()[2] == ()
    ledger = DeviceLedger(tmp_path, "now")
    before = len(ledger.bookings)
    assert ledger.report() == ({population_key("ward"): before}, ledger.head, ("before",))
    ledger.book(booking(4))
    ledger.book(booking(5, population="clinic"))
    ledger.book(booking(7))
    expected = {population_key("ward"): before + 2, population_key("clinic"): 1}
    assert ledger.report() == (expected, ledger.head, ("before",))


def test_a_ledger_takes_no_more_populations_and_keys_than_a_hello_reports(tmp_path, monkeypatch):
    for name, most in (("MAX_POPULATIONS", 3), ("MAX_EARLIER_KEYS", 2)):
        monkeypatch.setattr(privacy_ledger, name, most)
    for key in ("a", "b", "c"):
        DeviceLedger(tmp_path, key).book(booking(1, population=key, assignment=key))
    ledger, head = DeviceLedger(tmp_path, "c"), DeviceLedger(tmp_path).head
    with pytest.raises(Refused, match="would have 4 populations, and may have 3") as found:
        ledger.book(booking(2, population="d"))
    assert "count too little" in found.value.why
    assert found.value.hint.startswith("thinwire client privacy")
    assert (ledger.head, len(ledger.bookings)) == (head, 3), "nothing was written"
    with pytest.raises(Refused, match="3 earlier keys of this device, and may have 2"):
        DeviceLedger(tmp_path, "d").book(booking(2, population="a"))
    ledger.book(booking(2, population="a"))
    counts, _, keys = ledger.report()
    assert (counts[population_key("a")], len(counts), set(keys)) == (2, 3, {"a", "b"})


def test_a_file_that_was_cut_anywhere_keeps_every_whole_line_and_goes_on(tmp_path):
    """A kill in the middle of a write: the line was not acknowledged."""
    booked(tmp_path, 3)
    whole = (tmp_path / FILE).read_bytes()
    ends = [0, *(place + 1 for place, letter in enumerate(whole) if letter == ord("\n"))]
    for cut in range(len(whole) + 1):
        (tmp_path / FILE).write_bytes(whole[:cut])
        ledger = DeviceLedger(tmp_path)
        lines = sum(0 < end <= cut for end in ends)
        assert ledger.damage == ""
        assert len(ledger.bookings) == lines + (cut + 1 in ends[1:])  # whole but for its newline: it counts
        before = ledger.bookings
        ledger.book(booking(9))
        assert DeviceLedger(tmp_path).bookings == (*before, ledger.bookings[-1])


def test_no_changed_byte_takes_a_booking_back(tmp_path):
    booked(tmp_path, 3)
    whole = (tmp_path / FILE).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 7)
        (tmp_path / FILE).write_bytes(changed)
        ledger = DeviceLedger(tmp_path)
        assert ledger.damage, place
        for use in (lambda: ledger.book(booking(9)), lambda: ledger.spent(HERE)):  # noqa: B023
            with pytest.raises(DataLost, match=r"privacy\.jsonl"):
                use()
        assert (ledger.report(), (tmp_path / FILE).read_bytes()) == (({}, "", ()), bytes(changed))


def test_a_line_that_was_taken_out_or_moved_is_damage(tmp_path):
    booked(tmp_path, 4)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    for changed in (lines[1:], [*lines[:1], *lines[2:]], [lines[1], lines[0], *lines[2:]], [*lines, lines[-1]]):
        (tmp_path / FILE).write_bytes(b"".join(changed))
        assert "damaged" in DeviceLedger(tmp_path).damage


@pytest.mark.parametrize("what", ["folder", "cut while it runs", "link"])
def test_a_file_that_is_not_what_was_written_books_nothing(tmp_path, what):
    if what == "cut while it runs":
        ledger = booked(tmp_path, 2)
        os.truncate(tmp_path / FILE, 10)
    elif what == "folder":
        (tmp_path / FILE).mkdir()
        ledger = DeviceLedger(tmp_path)
    else:
        (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
        ledger = DeviceLedger(tmp_path)
    with pytest.raises(DataLost):
        ledger.book(booking(9))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("where", ["open", "ftruncate", "pwrite", "pwrite-part", "fsync", "fsync-folder"])
def test_a_disk_that_refuses_books_nothing_and_the_next_line_replaces_what_was_written(tmp_path, monkeypatch, where):
    ledger = DeviceLedger(tmp_path) if where == "fsync-folder" else booked(tmp_path, 2)
    before, real, calls = ledger.bookings, getattr(os, where.partition("-")[0]), []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        if where == "pwrite-part" and len(calls) == 1:
            return real(args[0], args[1][:20], args[2])
        if where == "fsync-folder" and len(calls) == 1:
            return real(*args)
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, where.partition("-")[0], refuse)
        with pytest.raises(NotWritten):
            ledger.book(booking(8))
    assert calls
    assert ledger.bookings == before
    ledger.book(booking(4))
    assert ledger.bookings[-1].round == 4
    assert DeviceLedger(tmp_path).bookings == ledger.bookings


class Killed(BaseException):
    pass


SYSTEM = ("open", "ftruncate", "pwrite", "fsync", "close")


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """The process dies before its call number `step`; a write that is the last one was made in part."""
    left = [step]
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in SYSTEM}

    def of(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and name != "close":  # a dying process closes everything
                raise Killed
            if left[0] == 0 and name == "pwrite":
                return real[name](args[0], args[1][: len(args[1]) // 2], args[2])
            return real[name](*args)

        return call

    patched = pytest.MonkeyPatch()
    for name in SYSTEM:
        patched.setattr(os, name, of(name))
    try:
        yield
    finally:
        patched.undo()


DEEDS = st.lists(st.tuples(st.sampled_from(["book", "again", "restart"]), st.integers(0, 14)), max_size=20)


@settings(max_examples=200, deadline=None)
@given(DEEDS)
def test_whatever_kills_it_when_all_that_was_acknowledged_is_spent(deeds):
    """Each deed may be killed at one of its calls of the system (14: it is not), and a new process goes on."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, number, acknowledged, begun = Path(temporary), 0, set[int](), set[int]()
        ledger = DeviceLedger(folder)
        for deed, step in deeds:
            if deed == "restart":
                ledger = DeviceLedger(folder)
            else:
                number += deed == "book" or number == 0
                begun.add(number)
                try:
                    with killed_at(step):
                        ledger.book(booking(number))
                    acknowledged.add(number)
                except Killed:
                    ledger = DeviceLedger(folder)
            found = [one.round for one in ledger.bookings]
            assert ledger.damage == ""
            assert len(found) == len(set(found))
            assert acknowledged <= set(found) <= begun
            assert sum(ledger.spent(HERE).values()) == len(found)


def test_a_device_that_leaves_keeps_its_ledger(tmp_path):
    """Its data are what they were, and another aggregator gets no fresh budget."""
    ledger = booked(tmp_path, 2)
    delete_learned(tmp_path)
    assert DeviceLedger(tmp_path).bookings == ledger.bookings
