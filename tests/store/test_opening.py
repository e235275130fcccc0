from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, inspect, text

from tests.store.write_golden_store import GOLDEN
from tests.support.fork_server import Forked
from tests.support.postgres import OwnTables
from tests.support.processes import environment
from tests.support.store_agreement import assert_sums_agree
from tests.support.store_story import accepted, header, new_run, opened
from thinwire.core.errors import DataLost, Unreachable, UsageError
from thinwire.store import Store, database, schema, tables


def differences(store: Store) -> list[object]:
    with store._database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, tables.Run.metadata))


def test_a_new_database_has_the_tables_that_the_program_uses(store: Store) -> None:
    assert differences(store) == []


@pytest.mark.parametrize("recorded", sorted(GOLDEN.parent.iterdir()), ids=lambda folder: folder.name)
def test_the_migrations_make_the_tables_that_the_program_uses(tmp_path: Path, recorded: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite3")) as made:
        made.executescript((recorded / "store.sql").read_text())
    with Store.open(tmp_path / "store.sqlite3", upgrade=True) as store:
        assert differences(store) == []


def test_a_statement_is_put_into_words_once_for_all_databases(tmp_path: Path) -> None:
    def worded(name: str) -> int:
        with Store.open(tmp_path / name) as store:
            assert (store.runs(), list(store.devices())) == ([], [])
        return len(database.COMPILED_STATEMENTS)

    assert worded("first") == worded("second") > 0


def test_each_migration_is_known_by_its_number_and_follows_the_one_before() -> None:
    scripts = ScriptDirectory(schema.MIGRATIONS, version_locations=[schema.MIGRATIONS])
    steps = list(reversed(list(scripts.walk_revisions())))
    assert [step.revision for step in steps] == schema.revisions()
    assert [step.down_revision for step in steps] == [None, *schema.revisions()[:-1]]


def test_a_store_is_there_again_when_it_is_opened_again(address: str) -> None:
    with Store.open(address) as store:
        run_id = new_run(store)
    with Store.open(store.url) as again:
        assert again.run(run_id).status == "queued"


def test_an_index_that_an_earlier_version_did_not_make_is_made_at_the_next_opening(address: str) -> None:
    index = "ix_rounds_run_id_seconds_round"

    def names(store: Store) -> set[str]:
        return {str(one["name"]) for one in inspect(store._database.engine).get_indexes("rounds")}

    with Store.open(address) as store, store._database.writing() as connection:
        connection.execute(text(f"DROP INDEX {index}"))
    with Store.open(address, read_only=True) as store:
        assert store.slowest_rounds("digits-1", 5) == []
        assert index not in names(store)
    with Store.open(address) as store:
        assert index in names(store)


def test_a_database_newer_than_the_program_is_refused(address: str) -> None:
    with Store.open(address) as store, store._database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DataLost, match="newer than this program") as refused:
        Store.open(address)
    assert refused.value.exit_code == 8
    assert "9999" in refused.value.why
    assert refused.value.hint


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite3"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE cats (name)")
    theirs.close()
    with pytest.raises(DataLost, match="not Thinwire's"):
        Store.open(path)


@pytest.mark.parametrize("damage", ["no database", "torn header"])
def test_a_damaged_file_is_data_lost(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store.sqlite3"
    if damage == "no database":
        path.write_bytes(b"this is not a database, it only lies where one was\n" * 200)
    else:
        Store.open(path).close()
        path.write_bytes(path.read_bytes()[:1000] + bytes(range(256)) * 100)
    with pytest.raises(DataLost) as lost:
        Store.open(path)
    assert lost.value.exit_code == 8
    assert "backup" in lost.value.hint


def test_a_place_where_no_file_can_be_is_data_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataLost, match="cannot write"):
        Store.open(tmp_path / "file" / "store.sqlite3")


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite://", "://"])
def test_an_address_that_is_no_database_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError) as wrong:
        Store.open(url)
    assert "postgresql://" in wrong.value.hint


def test_a_server_that_ends_a_statement_is_not_called_unreachable(postgres: OwnTables) -> None:
    postgres.empty()
    refused = pytest.raises(Unreachable, match="cannot use the database")
    with Store.open(postgres.url) as store, refused as ended, store._database.reading() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 1"))
        connection.execute(text("SELECT pg_sleep(60)"))
    assert "SQLSTATE 57014" in ended.value.hint
    with pytest.raises(Unreachable, match="cannot reach the database"):
        Store.open("postgresql://nobody@127.0.0.1:1/none")


def test_a_database_that_another_process_keeps_busy_is_only_unreachable(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    with Store.open(address) as first, Store.open(address) as second:
        with first._database.writing(), pytest.raises(Unreachable, match="cannot use the database") as busy:
            second.commands.add("stop-service")
        assert second.commands.add("stop-service"), "it is free again"
    assert busy.value.why


def test_a_server_that_falls_silent_is_given_up(postgres: OwnTables) -> None:
    def settings(url: str) -> dict[str, str]:
        with Store.open(url) as store, contextlib.closing(store._database.engine.raw_connection()) as connection:
            assert connection.driver_connection is not None
            return dict(connection.driver_connection.info.get_parameters())

    postgres.empty()
    assert settings(postgres.url).items() >= {key: str(value) for key, value in database.SILENCE.items()}.items()
    chosen = settings(f"{postgres.url}?connect_timeout=3")
    assert (chosen["connect_timeout"], chosen["keepalives_idle"]) == ("3", "10"), "the operator's own value counts"


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="psycopg") as missing:
        Store.open("postgresql://nobody@127.0.0.1:1/none")
    assert "thinwire[postgres]" in missing.value.hint


def test_a_disk_that_refuses_to_be_written_is_told_when_the_store_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(path).close()
    engine = database._engine
    monkeypatch.setattr(database, "_engine", lambda url, read_only, durable: engine(url, True, durable))
    with pytest.raises(DataLost) as lost:
        Store.open(path)
    assert "readonly" in lost.value.why
    assert "--home" in lost.value.hint


def test_a_disk_that_becomes_read_only_stops_writing_and_nothing_else(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.sqlite3") as store:
        run_id = new_run(store)
        with store._database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA query_only=ON")
        with pytest.raises(DataLost, match="readonly"):
            store.record(run_id, opened(run_id, 1))
        assert store.rounds(run_id) == []
        assert store.run(run_id).status == "queued"


def test_a_store_opened_for_reading_reads_and_refuses_to_write(address: str) -> None:
    with Store.open(address) as store:
        run_id = new_run(store)
        with Store.open(address, read_only=True) as reader:
            assert reader.run(run_id).run_id == run_id
            with pytest.raises(DataLost, match="for reading only"):
                reader.commands.add("stop-run", run_id)


def test_reading_does_not_make_a_database(tmp_path: Path) -> None:
    with pytest.raises(DataLost):
        Store.open(tmp_path / "none.sqlite3", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_data_lost_and_the_store_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with Store.open(path) as store:
        run_id = new_run(store)
        pages = path.stat().st_size // 4096
        event.listen(store._database.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages + 12}"))
        store._database.engine.dispose()
        number = 0
        with pytest.raises(DataLost, match="full") as lost:
            for number in range(1, 1000):
                store.record(run_id, opened(run_id, number))
        assert "space" in lost.value.hint
        assert len(store.rounds(run_id)) == number - 1
        assert_sums_agree(store, run_id)
    with Store.open(path) as store:
        store.record(run_id, opened(run_id, number))
        assert len(store.rounds(run_id)) == number
        assert_sums_agree(store, run_id)


def test_a_store_is_private_to_its_owner(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.sqlite3") as store:
        new_run(store)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_file_name_with_signs_in_it_is_only_a_name(tmp_path: Path) -> None:
    for name in ("a b.sqlite3", "50%.sqlite3", "x?mode=memory", "#1.sqlite3"):
        Store.open(tmp_path / name).close()
        assert (tmp_path / name).stat().st_size > 0


def test_many_open_a_new_store_at_once(tmp_path: Path) -> None:
    code = "import sys; from thinwire.store import Store; Store.open(sys.argv[1]).close()"
    command = [sys.executable, "-c", code, str(tmp_path / "store.sqlite3")]
    processes = [Forked(command, stderr=subprocess.PIPE, env=environment()) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        for store in threads.map(lambda _: Store.open(tmp_path / "store.sqlite3"), range(4)):
            store.close()
    assert [(p.wait(timeout=60), p.communicate()[1]) for p in processes] == [(0, b"")] * 3


def test_threads_and_processes_write_at_the_same_time_and_nothing_is_lost(address: str) -> None:
    with Store.open(address) as ours, Store.open(address) as another:
        run_id = new_run(ours)
        ours.record(run_id, opened(run_id, 1, tuple(f"d{n}" for n in range(12))))
        begin = threading.Barrier(3)

        def answer(devices: range) -> None:
            begin.wait()
            for n in devices:
                ours.record(run_id, [accepted(header(run_id, 1, f"d{n}"), 1)])

        def command(_: range) -> None:
            begin.wait()
            for n in range(10):
                another.commands.add("login-code", args={"n": n})

        with ThreadPoolExecutor() as threads:
            list(
                threads.map(
                    lambda call: call[0](call[1]), [(answer, range(6)), (answer, range(6, 12)), (command, range(0))]
                )
            )
        assert ours.run(run_id).payload_up == 12 * 101
        assert [o.args["n"] for o in ours.commands.pending()] == list(range(10))
        assert_sums_agree(another, run_id)


def test_the_store_needs_no_torch_and_no_alembic_where_nothing_is_upgraded(tmp_path: Path) -> None:
    code = (
        "import sys; from thinwire.store import Store; [Store.open(sys.argv[1]).runs() for _ in range(2)]; "
        "print([name for name in ('torch', 'alembic', 'flwr') if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store.sqlite3")], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_the_log_that_a_long_reader_made_grow_shrinks_again(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with contextlib.closing(Store.open(path)) as store, store._database.writing() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_size_limit").scalar() == database.LOG_BYTES
