from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.story import LAYOUT, PLAN, accepted, closed, head, opened, status
from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.core.events import ShadowStored
from thinwire.core.fleet import TaskReport
from thinwire.core.home import AggregatorHome, Held, hold
from thinwire.core.types import Part, UpdateId
from thinwire.server.versions import Versions
from thinwire.store import FileSpool, Store, backup, restore, schema
from thinwire.store.archive import DATABASE, MANIFEST, Entry, Manifest
from thinwire.store.backup import back_up
from thinwire.store.copying import copy_file

BODY = b"frames of an answer"


class Place:
    """An aggregator's folder with a run that goes on, an answer in its spool, and a CA."""

    def __init__(self, folder: Path) -> None:
        self.home = AggregatorHome.under(folder)
        self.store = Store.open(self.home.database)
        self.run_id = self.store.create_run("digits", PLAN, LAYOUT, TaskReport("digits"))
        self.versions = Versions(self.home.run(self.run_id), LAYOUT)
        self.next(0)
        self.store.record(self.run_id, [status("running"), *opened(self.run_id, 1)])
        self.answer("pi-01")
        for name, data in {"ca.pem": b"a certificate", "ca.key": b"its key"}.items():
            (self.home.tls / name).write_bytes(data)

    def next(self, version: int) -> None:
        """Another version, and the one before it goes: what a closing round does."""
        params = np.full(LAYOUT.size, version, np.float32)
        none, remembered = np.zeros(0, np.float32), {"momentum": params}
        stored = self.versions.write(version, params, none, {}, 1.0, remembered)
        shadow = self.versions.path(version).with_suffix(".shadow")
        shadow.write_bytes(b"what devices hold of it")
        held = ShadowStored(1.0, version, "", shadow.name, [], shadow.with_suffix(".change").name, [])
        self.store.record(self.run_id, [stored, held])
        self.versions.prune([version], [version])

    def answer(self, device: str) -> None:
        part = Part("frame/0", len(BODY), "ff")
        reply = head(self.run_id, 1, device)
        reply = type(reply)(**{**reply.__dict__, "parts": (part,)})
        spool = FileSpool(self.home.spool)
        draft = spool.draft(reply.update_id)
        draft.write_bytes(BODY)
        spool.commit(draft, reply)
        self.store.record(self.run_id, [accepted(reply, 1)])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "here")


@pytest.fixture
def file(place: Place, tmp_path: Path) -> Path:
    back_up(place.home, tmp_path / "backup.tar", "1.2.3")
    return tmp_path / "backup.tar"


@pytest.fixture
def there(tmp_path: Path) -> AggregatorHome:
    return AggregatorHome(tmp_path / "there" / "aggregator")


def contents(home: AggregatorHome) -> dict[str, bytes]:
    """Everything but the database and what belongs to a running process."""
    files = (path for name in ("runs", "spool", "tls") for path in (home.root / name).rglob("*") if path.is_file())
    return {str(path.relative_to(home.root)): path.read_bytes() for path in files}


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


# There and back.


def test_a_backup_of_a_store_in_use_is_restored_elsewhere_as_it_was(
    place: Place, file: Path, there: AggregatorHome
) -> None:
    before = contents(place.home)
    place.store.record(place.run_id, [closed(1, [f"{place.run_id}/pi-01/1"])])
    restored = restore.restore(file, there, force=False)
    assert (restored.replaced, restored.manifest.thinwire) == (None, "1.2.3")
    assert contents(there) == before
    assert len(before) == 7
    with Store.open(there.database) as store:
        assert store.rounds(place.run_id)[0].closed_at is None
        assert store.run(place.run_id).status == "running"
    (answer,) = FileSpool(there.spool).heads()
    assert b"".join(FileSpool(there.spool).open(answer.update_id)) == BODY


def test_what_is_restored_is_private_and_the_backup_too(place: Place, file: Path, there: AggregatorHome) -> None:
    restore.restore(file, there, force=False)
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
        path = place.home.spool / place.run_id / f"{device}-1.head"
        os.utime(path, ns=(number, 1_700_000_000_000_000_000 + number))
    back_up(place.home, tmp_path / "b.tar", "1")
    restore.restore(tmp_path / "b.tar", there, force=False)
    assert [h.update_id.device for h in FileSpool(there.spool).heads()] == ["pi-03", "pi-01", "pi-02"]


# While rounds close.


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
    restore.restore(tmp_path / "b.tar", there, force=False)
    with Store.open(there.database) as store:
        assert (there.root / "runs" / place.run_id / store.run(place.run_id).model_file).exists()
    assert copied == 2


@pytest.mark.parametrize(
    "lost",
    [
        "runs/digits-1/v000000.model",
        "runs/digits-1/v000000.state",
        "runs/digits-1/v000000.shadow",
        "spool/digits-1/pi-01-1.parts",
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


def test_what_strangers_named_does_not_stand_in_the_way(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    spool = FileSpool(place.home.spool)
    odd = UpdateId("no run of ours", "pi-01", 1)
    reply = head("x", 1, "pi-01")
    draft = spool.draft(odd)
    spool.commit(draft, type(reply)(**{**reply.__dict__, "update_id": odd, "parts": ()}))
    back_up(place.home, tmp_path / "b.tar", "1")
    restore.restore(tmp_path / "b.tar", there, force=False)
    assert [h.update_id.run for h in FileSpool(there.spool).heads()] == [place.run_id]


# Refusals.


def test_nothing_is_written_over(place: Place, file: Path) -> None:
    before, data = contents(place.home), file.read_bytes()
    with pytest.raises(UsageError, match="there already"):
        back_up(place.home, file, "1")
    with pytest.raises(UsageError, match="state in") as refused:
        restore.restore(file, place.home, force=False)
    assert "--force" in refused.value.hint
    assert (contents(place.home), file.read_bytes()) == (before, data)


def test_force_moves_what_was_there_aside(place: Place, file: Path) -> None:
    before = contents(place.home)
    place.next(1)
    after = contents(place.home)
    place.store.close()
    restored = restore.restore(file, place.home, force=True)
    assert restored.replaced is not None
    assert contents(place.home) == before
    assert contents(AggregatorHome(restored.replaced)) == after


def test_nothing_is_restored_under_a_running_aggregator(place: Place, file: Path) -> None:
    with hold(place.home.lock, {}), pytest.raises(Held):
        restore.restore(file, place.home, force=True)
    assert place.store.run(place.run_id).status == "running"


def test_a_backup_that_is_not_whole_changes_nothing(file: Path, there: AggregatorHome, tmp_path: Path) -> None:
    data = file.read_bytes()
    for cut in (0, 100, 513, len(data) // 2, data.rindex(b'"format"')):
        (tmp_path / "cut.tar").write_bytes(data[:cut])
        with pytest.raises(DataLost, match="no whole backup"):
            restore.restore(tmp_path / "cut.tar", there, force=False)
    for at in range(600, len(data), len(data) // 40):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        (tmp_path / "cut.tar").write_bytes(flipped)
        try:
            restored = restore.restore(tmp_path / "cut.tar", there, force=True)
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
        restore.restore(rewritten(file, add), there, force=False)
    assert list(there.root.glob("*")) in ([], [there.lock])


def test_a_link_in_a_backup_is_refused(file: Path, there: AggregatorHome) -> None:
    with tarfile.open(file, "w") as tar:
        info = tarfile.TarInfo("tls/ca.key")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(DataLost, match="does not belong"):
        restore.restore(file, there, force=False)


def test_a_backup_of_a_newer_version_is_refused(place: Place, tmp_path: Path, there: AggregatorHome) -> None:
    with place.store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    back_up(place.home, tmp_path / "b.tar", "9.9")
    with pytest.raises(DataLost, match="newer than this program") as refused:
        restore.restore(tmp_path / "b.tar", there, force=False)
    assert "thinwire 9.9" in refused.value.hint
    assert schema.revisions()[-1] in refused.value.why


def test_where_nothing_is_nothing_is_backed_up_or_restored(tmp_path: Path, there: AggregatorHome) -> None:
    with pytest.raises(NotFound):
        back_up(there, tmp_path / "b.tar", "1")
    with pytest.raises(NotFound):
        restore.restore(tmp_path / "b.tar", there, force=False)
    assert not there.root.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["files"][DATABASE].update(mtime_ns=10**40),
        lambda said: said["files"][DATABASE].update(mtime_ns=-1),
        lambda said: said["files"][DATABASE].update(size=float("inf")),
        lambda said: said.update(taken_at=float("nan")),
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
    with pytest.raises(ValueError, match="cannot be read"):
        Manifest.from_bytes(b'{"format":1,"files":' + b"[" * 200_000)
