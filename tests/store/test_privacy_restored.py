"""A restored privacy ledger has lost what was reserved since its backup: private rounds wait for a person."""

from __future__ import annotations

import contextlib
import json
import shlex
import sqlite3
from pathlib import Path

import pytest

from tests.store.test_privacy_ledger import CHEAP, DEAR, enrol, release_it, report, reserve
from tests.support.backups import Place
from tests.support.store_story import DEVICES, new_run
from thinwire.core.errors import DataLost, Refused
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store, backup
from thinwire.store.backup import back_up


@pytest.fixture
def private(place: Place) -> Place:
    """Two rounds: one released, one open."""
    enrol(place.store, *DEVICES)
    reserve(place.store, place.run_id, 2)
    release_it(place.store, place.run_id, 2)
    reserve(place.store, place.run_id, 3, release=DEAR)
    return place


def restored(place: Place, tmp_path: Path, there: AggregatorHome, name: str = "b.tar") -> Store:
    back_up(place.home, tmp_path / name, "1")
    backup.restore(tmp_path / name, there, force=True)
    return Store.open(there.database)


def test_an_open_reservation_stays_spent_and_is_never_released(
    private: Place, tmp_path: Path, there: AggregatorHome
) -> None:
    with restored(private, tmp_path, there) as store:
        states = [(row.state, row.round) for row in store.privacy.rows()]
        assert states == [("committed", 2), ("lost", 3), ("unknown", 0)]
        with pytest.raises(DataLost, match="no open reservation"):
            release_it(store, private.run_id, 3)
        store.privacy.settle("ward", 0, "", "ann")
        with pytest.raises(DataLost, match="no open reservation"):
            release_it(store, private.run_id, 3)
        assert store.privacy.spent("ward") == {CHEAP: 1, DEAR: 1}


@pytest.mark.parametrize("population", ["ward", "never seen"])
def test_every_population_is_blocked_until_it_is_settled(
    private: Place, tmp_path: Path, there: AggregatorHome, population: str
) -> None:
    with restored(private, tmp_path, there) as store:
        run_id = new_run(store)
        before = len(store.events(run_id))
        for attempt in (
            lambda: reserve(store, run_id, 1, population),
            lambda: store.privacy.spent(population),
            lambda: store.privacy.spent_by_device(population),
        ):
            with pytest.raises(DataLost, match="not known how much privacy") as found:
                attempt()
            assert "was restored from a backup of 20" in found.value.why
            assert found.value.hint.startswith(f"thinwire privacy ledger settle {shlex.quote(population)} --rounds N")
        assert len(store.events(run_id)) == before
        assert set(store.privacy.unknown()) == {"", "ward"}
        spent = {CHEAP: 1, DEAR: 1} if population == "ward" else {}
        store.privacy.settle(population, 7, DEAR, "ann")
        spent[DEAR] = spent.get(DEAR, 0) + 7
        assert store.privacy.spent(population) == spent
        reserve(store, run_id, 1, population, devices=DEVICES[:1])
        of_all = store.privacy.spent_by_device(population, ["new"])
        assert of_all["new"] == {DEAR: 7}
        (row,) = [row for row in store.privacy.rows(device="new") if row.state == "settled"]
        assert (row.who, row.count, row.population) == ("ann", 7, population)


def test_a_simulation_spends_after_a_restore_and_is_not_settled(
    private: Place, tmp_path: Path, there: AggregatorHome
) -> None:
    """Its population is its own, and each one has another: a person could settle none before it begins."""
    with restored(private, tmp_path, there) as store:
        run_id = new_run(store, source="sim")
        assert store.privacy.spent_by_device("simulation", ["pi-01"], simulated=True) == {"pi-01": {}}
        reserve(store, run_id, 1, "simulation", devices=["pi-01"])
        assert store.privacy.spent_by_device("simulation", simulated=True) == {"pi-01": {CHEAP: 1}}
        assert set(store.privacy.unknown()) == {"", "ward"}
        with pytest.raises(DataLost):
            reserve(store, new_run(store), 1, "simulation")


def test_a_settlement_holds_until_the_next_restore(private: Place, tmp_path: Path, there: AggregatorHome) -> None:
    with restored(private, tmp_path, there) as store:
        store.privacy.settle("ward", 1, CHEAP, "ann")
        assert store.privacy.spent("ward") == {CHEAP: 2, DEAR: 1}
    back_up(there, tmp_path / "second.tar", "1")
    backup.restore(tmp_path / "second.tar", there, force=True)
    with Store.open(there.database) as store:
        with pytest.raises(DataLost):
            store.privacy.spent("ward")
        store.privacy.settle("ward", 0, "", "ann")
        assert store.privacy.spent("ward") == {CHEAP: 2, DEAR: 1}


def test_what_devices_have_in_their_own_ledgers_is_the_least_that_can_be_settled(
    private: Place, tmp_path: Path, there: AggregatorHome
) -> None:
    with restored(private, tmp_path, there) as store:
        report(store, "pi-01", "ward", 2 + 4)
        report(store, "pi-02", "ward", 2 + 3)
        with pytest.raises(Refused) as found:
            store.privacy.settle("ward", 3, CHEAP, "ann")
        assert found.value.hint == "thinwire privacy ledger settle ward --rounds 4, or more"
        store.privacy.settle("ward", 4, CHEAP, "ann")
        assert store.privacy.spent("ward") == {CHEAP: 5, DEAR: 1}
        report(store, "pi-03", "ward", 7)  # it was offline when a person settled
        with pytest.raises(DataLost, match="not known how much privacy"):
            reserve(store, private.run_id, 4)


def test_a_copied_folder_is_noticed_by_what_devices_report(private: Place) -> None:
    """Nobody restored anything: the folder is an older copy, or a virtual machine was set back."""
    report(private.store, "pi-03", "ward", 3)
    with pytest.raises(DataLost, match="not known how much privacy"):
        reserve(private.store, private.run_id, 4)


@pytest.mark.parametrize(("mode", "is_new"), [("central", True), ("off", False)])
def test_a_private_run_gets_a_new_identity_so_that_devices_book_its_rounds_again(
    place: Place, tmp_path: Path, there: AggregatorHome, mode: str, is_new: bool
) -> None:
    with contextlib.closing(sqlite3.connect(place.home.database)) as opened:
        (plan,) = opened.execute("SELECT plan FROM runs").fetchone()
        changed = json.loads(plan)
        changed["privacy"]["mode"] = mode
        opened.execute("UPDATE runs SET plan = ?", (json.dumps(changed),))
        opened.commit()
    before = place.store.run(place.run_id).identity
    with restored(place, tmp_path, there) as store:
        assert (store.run(place.run_id).identity != before) == is_new
