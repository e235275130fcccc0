"""What is not backed up and not restored: over something, under a running aggregator, of a file that is not whole."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.backups import Place, contents
from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.core.statedir import AggregatorHome, Held, hold
from thinwire.store import backup, schema
from thinwire.store.backup import DATABASE, MANIFEST, Entry, Manifest, back_up


def rewritten(file: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The same archive with other members."""
    with tarfile.open(file) as tar:
        members = {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}
    change(members)
    file.unlink()
    with tarfile.open(file, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def test_nothing_is_written_over(place: Place, file: Path) -> None:
    before, data = contents(place.home), file.read_bytes()
    with pytest.raises(UsageError, match="there already"):
        back_up(place.home, file, "1")
    with pytest.raises(UsageError, match="state in") as refused:
        backup.restore(file, place.home, force=False)
    assert "--force" in refused.value.hint
    assert (contents(place.home), file.read_bytes()) == (before, data)


def test_force_moves_what_was_there_aside(place: Place, file: Path) -> None:
    before = contents(place.home)
    place.next(1)
    after = contents(place.home)
    place.store.close()
    restored = backup.restore(file, place.home, force=True)
    assert restored.replaced is not None
    assert contents(place.home) == before
    assert contents(AggregatorHome(restored.replaced)) == after


def test_nothing_is_restored_under_a_running_aggregator(place: Place, file: Path) -> None:
    with hold(place.home.lock, {}), pytest.raises(Held):
        backup.restore(file, place.home, force=True)
    assert place.store.run(place.run_id).status == "running"


def test_a_backup_that_is_not_whole_changes_nothing(file: Path, there: AggregatorHome, tmp_path: Path) -> None:
    data = file.read_bytes()
    for cut in (0, 100, 513, len(data) // 2, data.rindex(b'"format"')):
        (tmp_path / "cut.tar").write_bytes(data[:cut])
        with pytest.raises(DataLost, match="no whole backup"):
            backup.restore(tmp_path / "cut.tar", there, force=False)
    for at in range(600, len(data), len(data) // 40):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        (tmp_path / "cut.tar").write_bytes(flipped)
        try:
            restored = backup.restore(tmp_path / "cut.tar", there, force=True)
        except DataLost:
            continue
        assert restored.manifest.files, "only padding differs"
        with tarfile.open(tmp_path / "cut.tar") as changed, tarfile.open(file) as whole:
            for member in whole:
                assert (changed.extractfile(member.name) or io.BytesIO()).read() == (
                    whole.extractfile(member) or io.BytesIO()
                ).read()


@pytest.mark.parametrize("name", ["../out", "/etc/out", "runs/../../out", "tls", "clients/pi-01/key.pem", "runs/.x"])
def test_a_file_that_does_not_belong_there_is_refused(file: Path, there: AggregatorHome, name: str) -> None:
    def add(members: dict[str, bytes]) -> None:
        listed = json.loads(members.pop(MANIFEST))
        members[name] = b""
        members[MANIFEST] = json.dumps(listed).encode()

    with pytest.raises(DataLost, match="no whole backup"):
        backup.restore(rewritten(file, add), there, force=False)
    assert list(there.root.glob("*")) in ([], [there.lock])


def test_a_link_in_a_backup_is_refused(file: Path, there: AggregatorHome) -> None:
    with tarfile.open(file, "w") as tar:
        info = tarfile.TarInfo("tls/ca.key")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(DataLost, match="does not belong"):
        backup.restore(file, there, force=False)


def test_a_backup_of_a_newer_version_is_refused(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    with place.store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    back_up(place.home, tmp_path / "b.tar", "9.9")
    with pytest.raises(DataLost, match="newer than this program") as refused:
        backup.restore(tmp_path / "b.tar", there, force=False)
    assert "thinwire 9.9" in refused.value.hint
    assert schema.revisions()[-1] in refused.value.why


def test_a_backup_with_other_columns_is_refused(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    with place.store._database.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE rounds DROP COLUMN detail")
    back_up(place.home, tmp_path / "b.tar", "0.1.0")
    with pytest.raises(DataLost, match=r"b\.tar is of another version") as refused:
        backup.restore(tmp_path / "b.tar", there, force=False)
    assert "thinwire 0.1.0" in refused.value.hint
    assert "no column rounds.detail" in refused.value.why


def test_where_nothing_is_nothing_is_backed_up_or_restored(tmp_path: Path, there: AggregatorHome) -> None:
    with pytest.raises(NotFound):
        back_up(there, tmp_path / "b.tar", "1")
    with pytest.raises(NotFound):
        backup.restore(tmp_path / "b.tar", there, force=False)
    assert not there.root.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["files"][DATABASE].update(mtime_ns=10**40),
        lambda said: said["files"][DATABASE].update(mtime_ns=-1),
        lambda said: said["files"][DATABASE].update(size=float("inf")),
        lambda said: said.update(backed_up_at=float("nan")),
        lambda said: said.update(files=10**400),
    ],
)
def test_a_list_of_files_that_cannot_be_is_not_believed(change: Callable[[dict[str, Any]], None]) -> None:
    said = json.loads(Manifest(1.0, "1", {DATABASE: Entry(1, "0" * 64, 1)}).to_bytes())
    assert Manifest.from_bytes(json.dumps(said).encode()).files[DATABASE].size == 1
    change(said)
    with pytest.raises(ValueError):
        Manifest.from_bytes(json.dumps(said).encode())


def test_a_list_of_files_without_a_bottom_is_not_believed() -> None:
    with pytest.raises(ValueError, match="is not readable"):
        Manifest.from_bytes(b'{"format":1,"files":' + b"[" * 200_000)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[" + b"0," * 400 + b"0]"])
def test_a_manifest_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch, data):
    monkeypatch.setattr("thinwire.store.backup.LARGEST_MANIFEST", 200_000 if data.endswith(b"[") else 1000)
    with pytest.raises(ValueError, match=r"nested|more than"):
        Manifest.from_bytes(data)
