"""What a population has spent never falls: reserved with the opening of a round, whatever becomes of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event, text

from tests.support.store_agreement import empty_store
from tests.support.store_story import DEVICES, closed, new_run, opened, status
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import DataLost, Refused, UsageError
from thinwire.core.events import ClientSelected, RoundClosed, RoundOpened
from thinwire.core.fleet import MAX_RELEASES, Hello, population_key
from thinwire.core.formatting import Reason
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved
from thinwire.store import Store

CHEAP, DEAR = '{"variance": 4.0}', '{"variance": 1.0}'


def enrol(store: Store, *names: str) -> None:
    for name in names:
        key = b"the key of " + name.encode()
        store.roster.enrol(name, hashlib.sha256(key).hexdigest(), key, "manual")
        store.roster.approve(name)


def reserve(
    store: Store, run_id: str, number: int, population: str = "ward", release: str = CHEAP, devices: Any = DEVICES
) -> None:
    reserved = PrivacyReserved(10.0 * number, number, population, release, list(devices))
    store.record(run_id, [*opened(run_id, number, tuple(devices)), reserved])


def release_it(store: Store, run_id: str, number: int) -> None:
    store.record(run_id, [closed(number, []), PrivacyCommitted(10.0 * number + 9, number, "ab" * 32)])


def report(store: Store, name: str, population: str, count: int) -> None:
    store.roster.seen(Hello(name, "p1", booked={population_key(population): count}, booked_head="ff" * 32), at=1.0)


def test_a_round_is_reserved_as_it_opens_and_committed_as_it_closes(store: Store) -> None:
    run_id = new_run(store)
    reserve(store, run_id, 1)
    (row,) = store.privacy.rows()
    assert (row.state, row.population, row.run_id, row.round, row.release) == ("reserved", "ward", run_id, 1, CHEAP)
    assert (row.at, row.devices, row.digest) == (10.0, DEVICES, "")
    release_it(store, run_id, 1)
    (row,) = store.privacy.rows()
    assert (row.state, row.digest) == ("committed", "ab" * 32)
    assert store.privacy.spent("ward") == {CHEAP: 1}


def test_on_a_full_disk_no_round_opens_that_is_not_reserved(tmp_path: Path) -> None:
    """One transaction has both: a device gets no assignment whose noise is not in the ledger."""
    path = tmp_path / "store.sqlite3"
    with Store.open(path) as store:
        run_id = new_run(store)
        most = path.stat().st_size // 4096 + 12
        event.listen(store._database.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={most}"))
        store._database.engine.dispose()
        number = 0
        with pytest.raises(DataLost, match="full"):
            for number in range(1, 1000):
                reserve(store, run_id, number)
        assert number > 1
        assert [row.round for row in store.privacy.rows()] == [row.round for row in store.rounds(run_id)]
    with Store.open(path) as store:
        reserve(store, run_id, number)
        assert store.privacy.spent("ward") == {CHEAP: number}


def test_a_round_without_a_release_stays_spent(store: Store) -> None:
    run_id = new_run(store)
    reserve(store, run_id, 1)
    store.record(run_id, [closed(1, [], reason="too-few")])
    reserve(store, run_id, 2)
    release_it(store, run_id, 2)
    assert [row.state for row in store.privacy.rows()] == ["reserved", "committed"]
    assert store.privacy.spent("ward") == {CHEAP: 2}


def test_the_ledger_is_kept_by_population_over_runs(store: Store) -> None:
    first, second = new_run(store), new_run(store)
    reserve(store, first, 1)
    reserve(store, second, 1, release=DEAR)
    reserve(store, second, 2, population="clinic")
    assert store.privacy.spent("ward") == {CHEAP: 1, DEAR: 1}
    assert store.privacy.spent("clinic") == {CHEAP: 1}
    assert store.privacy.spent("nobody") == {}
    assert [row.run_id for row in store.privacy.rows("ward")] == [first, second]


def test_a_round_may_reserve_more_than_one_release(store: Store) -> None:
    run_id = new_run(store)
    of_the_clip = PrivacyReserved(10.0, 1, "ward", DEAR, list(DEVICES))
    store.record(run_id, [*opened(run_id, 1), of_the_clip, PrivacyReserved(10.0, 1, "ward", CHEAP, list(DEVICES))])
    release_it(store, run_id, 1)
    assert [row.state for row in store.privacy.rows()] == ["committed", "committed"]
    assert store.privacy.spent("ward") == {CHEAP: 1, DEAR: 1}


@pytest.mark.parametrize("before", ["", "committed", "another"])
def test_nothing_is_released_that_was_not_reserved(store: Store, before: str) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    if before == "committed":
        store.record(run_id, [PrivacyReserved(10.0, 1, "ward", CHEAP)])
        store.record(run_id, [PrivacyCommitted(19.0, 1, "ab" * 32)])
    elif before == "another":
        reserve(store, run_id, 2)
    with pytest.raises(DataLost, match="no open reservation"):
        release_it(store, run_id, 1)
    assert store.rounds(run_id)[0].closed_at is None
    assert not any(isinstance(one, RoundClosed) for _, one in store.events(run_id))


def test_a_reservation_of_nobody_or_nothing_is_an_error() -> None:
    for population, release in (("", CHEAP), ("ward", "")):
        with pytest.raises(ValueError, match="a reservation names"):
            PrivacyReserved(1.0, 1, population, release)


def test_what_each_device_took_part_in_is_counted_by_device(store: Store) -> None:
    run_id = new_run(store)
    reserve(store, run_id, 1, devices=DEVICES[:2])
    reserve(store, run_id, 2, devices=DEVICES[1:])
    reserve(store, run_id, 3, release=DEAR, devices=DEVICES[1:2])
    found = store.privacy.spent_by_device("ward", ["never-there"])
    expected = {DEVICES[0]: {CHEAP: 1}, DEVICES[1]: {CHEAP: 2, DEAR: 1}, DEVICES[2]: {CHEAP: 1}, "never-there": {}}
    assert found == expected
    assert [row.round for row in store.privacy.rows(device=DEVICES[2])] == [2]


def test_a_device_that_is_selected_later_in_the_round_took_part_too(store: Store) -> None:
    run_id = new_run(store)
    reserve(store, run_id, 1, devices=DEVICES[:2])
    for device, assignment_id in (("pi-03", "first"), ("pi-03", "again"), ("pi-01", "again")):
        why = [Reason("replaces", {})]
        store.record(run_id, [ClientSelected(12.0, 1, device, f"{run_id}.1.{device}.{assignment_id}", 10, why=why)])
    assert store.privacy.rows()[0].devices == DEVICES


def test_a_device_keeps_what_it_spent_under_a_new_name_and_its_old_name_brings_nothing(store: Store) -> None:
    enrol(store, *DEVICES)
    run_id = new_run(store)
    reserve(store, run_id, 1, devices=DEVICES[:1])
    store.record(run_id, [status("done")])
    store.roster.rename("pi-01", "ward-1")
    store.roster.enrol("pi-01", "e" * 64, b"another key", "manual")
    assert store.privacy.spent_by_device("ward", ["pi-01"]) == {"pi-01": {}, "ward-1": {CHEAP: 1}}
    assert store.privacy.rows()[0].devices == ("ward-1",)


def test_a_simulated_device_is_not_the_enrolled_one_of_its_name(store: Store) -> None:
    enrol(store, "pi-01")
    reserve(store, new_run(store, source="sim"), 1, devices=["pi-01"])
    with store._database.reading() as connection:
        assert connection.execute(text("SELECT device FROM privacy_participants")).scalar_one() == "pi-01"


def test_the_ledger_outlives_its_run(store: Store) -> None:
    run_id = new_run(store)
    reserve(store, run_id, 1)
    release_it(store, run_id, 1)
    with store._database.writing() as connection:
        for table in ("updates", "clients", "rounds", "checkpoints", "journal", "runs"):
            connection.execute(text(f"DELETE FROM {table}"))
    assert store.runs() == []
    assert store.privacy.spent_by_device("ward") == {device: {CHEAP: 1} for device in DEVICES}


def test_a_simulation_that_gathers_its_events_writes_a_reservation_at_once(store: Store) -> None:
    run_id = new_run(store, source="sim")
    with store.gathering(run_id):
        store.record(run_id, [])
        reserve(store, run_id, 1)
        with Store.open(store.url, read_only=True) as other:
            assert other.privacy.spent("ward") == {CHEAP: 1}


def test_a_device_that_knows_of_more_releases_blocks_its_population_until_that_is_settled(store: Store) -> None:
    enrol(store, *DEVICES)
    run_id = new_run(store)
    reserve(store, run_id, 1)
    report(store, "pi-02", "ward", 1)
    reserve(store, run_id, 2)  # it knows of no more than is here
    report(store, "pi-02", "ward", 5)
    report(store, "pi-02", "ward", 4)  # what it said once stays
    for attempt in (lambda: reserve(store, run_id, 3), lambda: store.privacy.spent("ward")):
        with pytest.raises(DataLost) as found:
            attempt()
        assert found.value.why == "pi-02 has 5 releases of it in its own ledger, and 2 in this one"
        assert found.value.hint == (
            "thinwire privacy ledger settle ward --rounds 3, or more; it charges everyone, so if you do not believe "
            "pi-02: thinwire devices revoke pi-02"
        )
    store.roster.revoke("pi-02")
    assert store.privacy.unknown() == {}
    store.roster.approve("pi-02")
    assert not any(isinstance(one, RoundOpened) and one.round == 3 for _, one in store.events(run_id))
    assert store.privacy.spent("clinic") == {}
    with pytest.raises(Refused, match="less than what devices have recorded"):
        store.privacy.settle("ward", 2, DEAR, "ann")
    store.privacy.settle("ward", 3, DEAR, "ann")
    assert store.privacy.spent("ward") == {CHEAP: 2, DEAR: 3}
    assert store.privacy.spent_by_device("ward")["pi-01"] == {CHEAP: 2, DEAR: 3}
    reserve(store, run_id, 3)
    with pytest.raises(UsageError, match="nothing is to be settled"):
        store.privacy.settle("ward", 3, DEAR, "ann")


def test_a_release_without_participants_is_spent_by_everyone_in_the_population(store: Store) -> None:
    """So a round with Poisson sampling names nobody; a device that comes later pays for it too."""
    run_id = new_run(store)
    enrol(store, "pi-01", "pi-02")
    reserve(store, run_id, 1, devices=("pi-01",))
    reserve(store, run_id, 2, release=DEAR, devices=())
    reserve(store, run_id, 3, release=DEAR, devices=())
    assert store.privacy.spent_by_device("ward", ["pi-01", "pi-09"]) == {
        "pi-01": {CHEAP: 1, DEAR: 2}, "pi-09": {DEAR: 2},
    }  # fmt: skip
    assert store.privacy.spent("ward") == {CHEAP: 1, DEAR: 2}
    assert [row.round for row in store.privacy.rows(device="pi-02")] == [2, 3]
    report(store, "pi-02", "ward", 2)
    assert store.privacy.unknown() == {}, "its own ledger has the rounds in which it was sampled, at most all"
    report(store, "pi-02", "ward", 3)
    assert "ward" in store.privacy.unknown()


def test_a_revoked_device_blocks_nothing(store: Store) -> None:
    enrol(store, *DEVICES)
    for count in (0, 1000):  # it did not bring them with it
        report(store, "pi-02", "ward", count)
    assert list(store.privacy.unknown()) == []  # the population has no entry yet
    with pytest.raises(DataLost):
        store.privacy.spent("ward")
    store.roster.revoke("pi-02")
    assert store.privacy.spent("ward") == {}


@pytest.mark.parametrize(
    ("population", "rounds", "release"),
    [("", 1, CHEAP), ("ward", -1, CHEAP), ("ward", 1, ""), ("ward", MAX_RELEASES + 1, CHEAP), ("ward", 2**63, CHEAP)],
)
def test_a_settlement_of_nobody_nothing_less_or_too_much_is_refused(
    store: Store, population: str, rounds: int, release: str
) -> None:
    with pytest.raises(UsageError, match="is no valid charge"):
        store.privacy.settle(population, rounds, release, "ann")


def test_the_largest_settlements_add_up_exactly(store: Store) -> None:
    enrol(store, "pi-01")
    for _ in range(3):
        store.privacy.settle("ward", MAX_RELEASES, CHEAP, "ann", "pi-01")
    with pytest.raises(UsageError, match="is no valid charge") as found:
        store.privacy.settle("ward", 2**62, CHEAP, "ann", "pi-01")
    assert "to 1000000000" in found.value.why
    assert store.privacy.spent("ward") == store.privacy.spent_by_device("ward")["pi-01"] == {CHEAP: 3 * MAX_RELEASES}
    assert sums(store) == added_up(store)


def sums(store: Store) -> dict[tuple[str, str, str], int]:
    with store._database.reading() as connection:
        found = connection.execute(text("SELECT population, device, release, count FROM privacy_spent")).all()
    return {(population, device, release): count for population, device, release, count in found}


def added_up(store: Store) -> Counter[tuple[str, str, str]]:
    """The same from the entries; one without participants is everyone's, whose device is ""."""
    parts = "SELECT e.population, coalesce(p.device, ''), e.release, e.count FROM privacy_ledger e"
    with store._database.reading() as connection:
        rows = connection.execute(text(f"{parts} LEFT JOIN privacy_participants p ON p.entry = e.id")).all()
    found = Counter[tuple[str, str, str]]()
    for population, device, release, count in rows:
        found[population, device, release] += count
    return +found


def test_the_sums_are_those_of_the_entries_whatever_happened(store: Store) -> None:
    enrol(store, *DEVICES)
    run_id, simulated = new_run(store), new_run(store, source="sim")
    reserve(store, run_id, 1, devices=DEVICES[:2])
    reserve(store, run_id, 2, release=DEAR)
    reserve(store, simulated, 1, population="clinic")
    store.record(run_id, [PrivacyReserved(25.0, 2, "ward", CHEAP, list(DEVICES))])  # two releases in a round
    for device in ("pi-01", "pi-03"):  # pi-03 was selected later, pi-01 again
        why = [Reason("replaces", {})]
        store.record(run_id, [ClientSelected(12.0, 1, device, f"{run_id}.1.{device}.later", 10, why=why)])
    reserve(store, run_id, 3, devices=())
    store.record(run_id, [ClientSelected(32.0, 3, "pi-01", f"{run_id}.3.pi-01.later", 10, why=why)])
    release_it(store, run_id, 2)
    report(store, "pi-02", "ward", 9)
    store.privacy.settle("ward", 5, DEAR, "ann")
    found = sums(store)
    assert found == added_up(store)
    assert found["ward", "", CHEAP] == 1, "everyone spends it, also if one of them is selected later"
    key = hashlib.sha256(b"the key of pi-03").hexdigest()
    assert found["ward", key, CHEAP] == found["ward", key, DEAR] + 1 == 2
    store.record(run_id, [status("done")])
    store.roster.revoke("pi-03")
    forgotten = store.forget_device("pi-03", "ann")
    assert forgotten is not None
    assert sums(store) == added_up(store) == {
        (ward, device.replace(key, forgotten.pseudonym), release): n for (ward, device, release), n in found.items()
    }  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from(DEVICES)), st.sampled_from([CHEAP, DEAR]), st.booleans())))
def test_the_sums_are_those_of_the_entries(rounds: list[tuple[set[str], str, bool]]) -> None:
    with empty_store() as store:
        run_id = new_run(store)
        for number, (devices, release, is_released) in enumerate(rounds, 1):
            reserve(store, run_id, number, release=release, devices=sorted(devices))
            (release_it if is_released else no_release)(store, run_id, number)
        assert sums(store) == added_up(store)


def test_opening_a_round_reads_no_more_rows_after_many_rounds(store: Store) -> None:
    """The sums have as many rows as the population has devices and releases."""
    run_id = new_run(store)
    sizes = []
    for number in range(1, 9):
        reserve(store, run_id, number)
        sizes.append(len(sums(store)))
    assert sizes == [len(DEVICES)] * 8
    assert store.privacy.spent_by_device("ward") == {device: {CHEAP: 8} for device in DEVICES}


class Killed(BaseException):
    pass


DEEDS = st.lists(st.sampled_from(["reserve", "commit", "close", "restart", "kill before", "kill after"]), max_size=25)


@settings(max_examples=20, deadline=None)
@given(DEEDS)
def test_whatever_happens_when_all_reservations_that_were_acknowledged_are_spent(deeds: list[str]) -> None:
    """A kill before a commit loses the transaction, one after it only its acknowledgement."""
    with empty_store() as store:
        run_id, path = new_run(store), store.url
        acknowledged, durable, number, is_open, fate = 0, 0, 0, False, ""
        for deed in deeds:
            if deed.startswith("kill"):
                fate = deed
                continue
            if deed == "restart":
                store.close()
                store = Store.open(path, clock=VirtualClock())
                assert number == len(store.rounds(run_id))
            elif deed == "reserve":
                ended = attempt(store, fate, lambda: reserve(store, run_id, number + 1))  # noqa: B023
                durable += ended != "kill before"
                number += ended != "kill before"
                acknowledged += ended == ""
                is_open = is_open or ended != "kill before"
                fate = ""
            elif is_open:
                what = release_it if deed == "commit" else no_release
                ended = attempt(store, fate, lambda: what(store, run_id, number))  # noqa: B023
                is_open, fate = ended == "kill before", ""
            spent = store.privacy.spent("ward").get(CHEAP, 0)
            assert acknowledged <= spent == durable
        store.close()


def no_release(store: Store, run_id: str, number: int) -> None:
    store.record(run_id, [closed(number, [], reason="too-few")])


def attempt(store: Store, fate: str, deed: Any) -> str:
    """How the deed ended: "" or the fate."""
    engine = store._database.engine

    def die(*_: Any) -> None:
        raise Killed

    if fate == "kill before":
        event.listen(engine, "commit", die)
    try:
        deed()
        return fate
    except Killed:
        return fate
    finally:
        if fate == "kill before":
            event.remove(engine, "commit", die)
