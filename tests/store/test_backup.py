"""A backup is what the folder was, whatever goes on beside it, and is restored as that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.store.test_invitations import joining
from tests.support.backups import BODY, Place, contents
from tests.support.store_story import closed, header, status
from thinwire.core.errors import DataLost, NotInvited
from thinwire.core.statedir import AggregatorHome, require_its_database
from thinwire.core.types import UpdateId
from thinwire.store import FileSpool, Store, backup
from thinwire.store.backup import back_up
from thinwire.store.schema import copy_file


def test_a_backup_of_a_store_in_use_is_restored_elsewhere_as_it_was(
    place: Place, file: Path, there: AggregatorHome
) -> None:
    before = contents(place.home)
    place.store.record(place.run_id, [closed(1, [f"{place.run_id}/pi-01/1"])])
    restored = backup.restore(file, there, force=False)
    assert (restored.replaced, restored.manifest.thinwire) == (None, "1.2.3")
    assert contents(there) == before
    assert len(before) == 6
    with Store.open(there.database) as store:
        assert store.rounds(place.run_id)[0].closed_at is None
        assert store.run(place.run_id).status == "running"
    (answer,) = FileSpool(there.spool).headers()
    assert b"".join(FileSpool(there.spool).open(answer.update_id)) == BODY


def test_what_is_restored_is_private_and_the_backup_too(place: Place, file: Path, there: AggregatorHome) -> None:
    backup.restore(file, there, force=False)
    modes = {path.stat().st_mode & 0o777 for path in there.root.rglob("*") if path.is_file()}
    folders = {path.stat().st_mode & 0o777 for path in [there.root, *there.root.rglob("*")] if path.is_dir()}
    assert (modes, folders, file.stat().st_mode & 0o777) == ({0o600}, {0o700}, 0o600)


def test_a_backup_leaves_nothing_behind_in_the_folder(place: Place, tmp_path: Path) -> None:
    left = place.home.root / ".backup" / "of a killed one"
    left.mkdir(parents=True)
    before = {path.name for path in place.home.root.iterdir()} - {".backup"}
    back_up(place.home, tmp_path / "b.tar", "1")
    assert {path.name for path in place.home.root.iterdir()} == before | {"backup.lock"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "here"]


def test_answers_come_back_in_the_order_of_their_arrival(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    for device in ("pi-03", "pi-02"):
        place.answer(device)
    for number, device in enumerate(("pi-03", "pi-01", "pi-02")):
        path = place.home.spool / place.run_id / f"{device}-1.reply"
        os.utime(path, ns=(number, 1_700_000_000_000_000_000 + number))
    back_up(place.home, tmp_path / "b.tar", "1")
    backup.restore(tmp_path / "b.tar", there, force=False)
    assert [h.update_id.device for h in FileSpool(there.spool).headers()] == ["pi-03", "pi-01", "pi-02"]


def test_a_model_that_came_and_went_while_the_database_was_copied_is_not_missing(
    place: Place, tmp_path: Path, there: AggregatorHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = 0

    def busy(source: Path, target: Path) -> Path:
        nonlocal copied
        copied += 1
        if copied == 1:
            place.next(1)
        copy_file(source, target)
        if copied == 1:
            place.next(2)
        return target

    monkeypatch.setattr(backup, "copy_file", busy)
    back_up(place.home, tmp_path / "b.tar", "1")
    backup.restore(tmp_path / "b.tar", there, force=False)
    with Store.open(there.database) as store:
        assert (there.root / "runs" / place.run_id / store.run(place.run_id).model_file).exists()
    assert copied == 2


@pytest.mark.parametrize(
    "lost",
    [
        "runs/digits-1/v000000.model",
        "runs/digits-1/v000000.state",
        "runs/digits-1/v000000.replica",
        "spool/digits-1/pi-01-1.reply",
    ],
)
def test_a_folder_that_lacks_what_a_run_needs_is_not_passed_off_as_a_backup(
    place: Place, tmp_path: Path, lost: str
) -> None:
    (place.home.root / lost).unlink()
    with pytest.raises(DataLost) as refused:
        back_up(place.home, tmp_path / "b.tar", "1")
    assert lost in refused.value.what
    assert not (tmp_path / "b.tar").exists()
    place.store.record(place.run_id, [status("stopped")])
    back_up(place.home, tmp_path / "b.tar", "1")


def test_a_folder_that_vanishes_meanwhile_is_no_reason_to_fail(
    place: Place, tmp_path: Path, there: AggregatorHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a device's replies in the spool, once the last one of a run is aggregated."""
    gone, scandir = place.home.spool / "digits-0", os.scandir
    gone.mkdir()

    def scanned(path: Any = ".") -> Any:
        if str(path) == str(gone):
            gone.rmdir()
        return scandir(path)

    before = contents(place.home)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scanned)
        back_up(place.home, tmp_path / "b.tar", "1")
    backup.restore(tmp_path / "b.tar", there, force=False)
    assert not gone.exists()
    assert contents(there) == before


def test_what_strangers_named_does_not_stand_in_the_way(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    spool = FileSpool(place.home.spool)
    odd = UpdateId("no run of ours", "pi-01", 1)
    reply = header("x", 1, "pi-01")
    draft = spool.draft(odd)
    spool.commit(draft, type(reply)(**{**reply.__dict__, "update_id": odd, "parts": ()}))
    back_up(place.home, tmp_path / "b.tar", "1")
    backup.restore(tmp_path / "b.tar", there, force=False)
    assert [h.update_id.run for h in FileSpool(there.spool).headers()] == [place.run_id]


def test_a_restore_ends_all_sessions_and_keeps_the_users(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    place.store.users.add("anna", "admin", "correct horse battery", "me")
    session = place.store.logins.redeem(place.store.logins.new_code())
    code = place.store.logins.new_code()
    assert session is not None
    back_up(place.home, tmp_path / "b.tar", "1")
    backup.restore(tmp_path / "b.tar", there, force=False)
    with Store.open(there.database) as store:
        assert [one.name for one in store.users.all()] == ["anna"]
        assert store.logins.redeem(code) is None
        assert not store.logins.valid(session)
        with store._database.reading() as connection:
            assert connection.execute(text("SELECT count(*) FROM sessions")).scalar() == 0


def test_a_restore_withdraws_the_open_invitations(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    """One that was used after the backup would open the aggregator to whoever has its secret since then."""
    early, late, withdrawn = (invited.secret for invited in place.store.invitations.invite(3))
    place.store.roster.join(joining(early, "ward-1", "a key"))
    place.store.invitations.withdraw(3)
    back_up(place.home, tmp_path / "b.tar", "1")
    place.store.roster.join(joining(late, "ward-2", "another key"))
    backup.restore(tmp_path / "b.tar", there, force=False)
    with Store.open(there.database) as store:
        assert [one.state for one in store.invitations.all()] == ["used", "withdrawn", "withdrawn"]
        for secret in (late, withdrawn):
            with pytest.raises(NotInvited):
                store.roster.join(joining(secret, "ward-3", "a thief's key"))


def test_a_restore_brings_the_key_of_reports_back(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    place.home.report_key.write_bytes(b"a key")
    back_up(place.home, tmp_path / "b.tar", "1")
    backup.restore(tmp_path / "b.tar", there, force=False)
    assert (there.report_key.read_bytes(), there.report_key.stat().st_mode & 0o777) == (b"a key", 0o600)


def test_a_restore_that_was_interrupted_is_not_followed_by_an_empty_aggregator(tmp_path: Path) -> None:
    """Killed between its two renames it leaves what it had written beside a folder that is gone."""
    (tmp_path / ".aggregator.restoring").mkdir()
    with pytest.raises(DataLost, match="was interrupted"):
        require_its_database(tmp_path / "aggregator" / "store.sqlite3")
