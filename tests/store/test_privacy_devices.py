"""Who is charged for what in the privacy ledger: a device that joins again goes on where its data were."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from sqlalchemy import select

from tests.store.test_privacy_ledger import CHEAP, DEAR, added_up, enrol, report, reserve, sums
from tests.support.store_story import new_run, status
from thinwire.core.errors import DataLost, NotFound, Refused, UsageError
from thinwire.core.fleet import MAX_POPULATIONS, Hello, population_key
from thinwire.store import Store
from thinwire.store.tables import Device


def key_of(name: str) -> str:
    return hashlib.sha256(b"the key of " + name.encode()).hexdigest()


def greet(store: Store, name: str, count: int, keys: Sequence[str] = (), population: str = "ward") -> None:
    """Register with a ledger of `count` releases, some of them under the keys that it had as `keys`."""
    booked = {population_key(population): count} if count else {}
    store.roster.seen(Hello(name, "p1", booked=booked, booked_keys=tuple(map(key_of, keys))), at=1.0)


def claim(store: Store, name: str, *texts: str) -> None:
    """Register with texts in the place of earlier keys, as a malicious client may."""
    store.roster.seen(Hello(name, "p1", booked={population_key("ward"): 1}, booked_keys=texts), at=1.0)


@pytest.fixture
def run_id(store: Store) -> str:
    """A run on devices; pi-01 took part in two rounds and left."""
    enrol(store, "pi-01", "pi-02")
    made = new_run(store)
    for number in (1, 2):
        reserve(store, made, number, devices=("pi-01", "pi-02"))
    for name in ("pi-01", "pi-02"):
        greet(store, name, 2)
    store.roster.leave("pi-01")
    return made


def test_a_device_that_joins_again_with_a_new_key_is_charged_for_its_earlier_rounds(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    assert store.privacy.spent_by_device("ward", ["ward-1"])["ward-1"] == {}, "as long as it has reported nothing"
    greet(store, "ward-1", 2, ["pi-01"])
    assert store.privacy.spent_by_device("ward") == {"pi-02": {CHEAP: 2}, "ward-1": {CHEAP: 2}}
    assert store.privacy.excluded("ward") == {}
    reserve(store, run_id, 3, release=DEAR, devices=("ward-1",))
    assert store.privacy.spent_by_device("ward")["ward-1"] == {CHEAP: 2, DEAR: 1}
    assert [row.devices for row in store.privacy.rows()] == [("pi-02", "ward-1")] * 2 + [("ward-1",)]
    greet(store, "ward-1", 3, ["pi-01"])
    assert store.privacy.unknown() == {}
    said = store.audit.actions("ward-1")[0]
    assert (said.what, said.detail) == ("carry", "pi-01"), "once, with the reason"
    assert sums(store) == added_up(store)


def test_a_device_that_joins_a_third_time_is_charged_for_all_its_keys(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    greet(store, "ward-1", 2, ["pi-01"])
    reserve(store, run_id, 3, devices=("ward-1",))
    store.roster.leave("ward-1")
    enrol(store, "ward-2")
    greet(store, "ward-2", 3, ["ward-1", "pi-01"])
    assert store.privacy.spent_by_device("ward") == {"pi-02": {CHEAP: 2}, "ward-2": {CHEAP: 3}}


def test_a_device_cannot_pass_its_spending_on_to_another_one(store: Store, run_id: str) -> None:
    """pi-03 names the key of pi-02, which is approved: it charges itself, and pi-02 pays what it paid before."""
    enrol(store, "pi-03")
    greet(store, "pi-03", 2, ["pi-02"])
    reserve(store, run_id, 3, devices=("pi-03",))
    spent = store.privacy.spent_by_device("ward")
    assert (spent["pi-02"], spent["pi-03"]) == ({CHEAP: 2}, {CHEAP: 3})


def test_an_earlier_enrolment_that_is_approved_again_pays_for_the_later_one_too(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    greet(store, "ward-1", 2, ["pi-01"])
    reserve(store, run_id, 3, devices=("ward-1",))
    store.roster.approve("pi-01")
    greet(store, "pi-01", 3, ["ward-1"])
    spent = store.privacy.spent_by_device("ward")
    assert (spent["pi-01"], spent["ward-1"]) == ({CHEAP: 3}, {CHEAP: 3})


@pytest.mark.parametrize("name", ["pi-01", "ward-1"])
def test_a_forgotten_device_that_enrolls_again_is_excluded_alone_until_it_is_charged(
    store: Store, run_id: str, name: str
) -> None:
    """Its pseudonym is random, so its spending is no longer known to be its own: the others go on."""
    store.record(run_id, [status("done")])
    store.forget_device("pi-01", "ann")
    enrol(store, name)  # with its old key, or with a new one
    greet(store, name, 2, [] if name == "pi-01" else ["pi-01"])
    why = store.privacy.excluded("ward")[name]
    assert "has 2 releases of ward in its own ledger from an enrolment that is not known here" in why
    assert why.endswith(f"thinwire privacy ledger settle ward --device {name} --rounds 2")
    assert store.privacy.unknown() == {}, "no other device is concerned"
    again = new_run(store)
    reserve(store, again, 1, devices=("pi-02",))
    with pytest.raises(Refused, match="less than what devices have recorded") as found:
        store.privacy.settle("ward", 1, DEAR, "ann", name)
    assert found.value.hint == f"thinwire privacy ledger settle ward --device {name} --rounds 2, or more"
    store.privacy.settle("ward", 2, DEAR, "ann", name)
    assert store.privacy.excluded("ward") == {}
    spent = store.privacy.spent_by_device("ward")
    assert (spent[name], spent["pi-02"]) == ({DEAR: 2}, {CHEAP: 3})
    (row,) = [row for row in store.privacy.rows() if row.state == "settled"]
    assert (row.devices, row.count, row.who) == ((name,), 2, "ann")
    assert sums(store) == added_up(store)
    greet(store, name, 3, [] if name == "pi-01" else ["pi-01"])  # what it lacks after that, the ledger has lost
    assert "ward" in store.privacy.unknown()


def test_a_device_whose_ledger_is_lost_may_be_charged_by_a_person(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    greet(store, "ward-1", 0)
    store.privacy.settle("ward", 2, CHEAP, "ann", "ward-1")
    assert store.privacy.spent_by_device("ward")["ward-1"] == {CHEAP: 2}
    with pytest.raises(NotFound, match="no device 'ward-9'"):
        store.privacy.settle("ward", 2, CHEAP, "ann", "ward-9")
    with pytest.raises(UsageError, match="is no valid charge"):
        store.privacy.settle("ward", 0, "", "ann", "ward-1")


def test_charging_a_device_does_not_unblock_its_population(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    report(store, "pi-02", "ward", 7)
    store.privacy.settle("ward", 9, CHEAP, "ann", "ward-1")
    with pytest.raises(DataLost, match="not known how much privacy"):
        reserve(store, run_id, 3)


def test_a_device_that_joined_again_is_forgotten_with_all_its_keys(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    greet(store, "ward-1", 2, ["pi-01"])
    reserve(store, run_id, 3, devices=("ward-1",))
    store.record(run_id, [status("done")])
    store.roster.leave("ward-1")
    before = sums(store)
    with pytest.raises(Refused, match="ward-1 is forgotten only together with pi-01") as refused:
        store.forget_device("ward-1", "ann")
    assert refused.value.hint.startswith("thinwire devices forget ward-1 --yes")
    assert ({row.name for row in store.roster.rows()}, sums(store)) == ({"pi-01", "pi-02", "ward-1"}, before)
    found = store.forget_device("ward-1", "ann", with_others=True)
    assert found is not None
    assert found.others == ("pi-01",)
    store.roster.refresh()
    assert store.privacy.spent_by_device("ward") == {"pi-02": {CHEAP: 2}, found.pseudonym: {CHEAP: 3}}
    assert [row.name for row in store.roster.rows()] == ["pi-02"]
    assert sums(store) == added_up(store)


def test_forgetting_an_earlier_enrolment_leaves_its_spending_with_the_device(store: Store, run_id: str) -> None:
    enrol(store, "ward-1")
    greet(store, "ward-1", 2, ["pi-01"])
    store.record(run_id, [status("done")])
    store.forget_device("pi-01", "ann")
    assert store.privacy.spent_by_device("ward") == {"pi-02": {CHEAP: 2}, "ward-1": {CHEAP: 2}}
    greet(store, "ward-1", 2, ["pi-01"])  # it reports the forgotten key, which is not stored again
    assert store.privacy.excluded("ward") == {}
    assert key_of("pi-01") not in repr([store.audit.actions("ward-1"), sums(store), _columns(store)])


def test_copies_of_a_device_that_took_part_together_stay_two_spendings_when_forgotten(
    store: Store, run_id: str
) -> None:
    enrol(store, "copy")
    greet(store, "copy", 2, ["pi-01"])
    store.roster.approve("pi-01")
    reserve(store, run_id, 3, devices=("pi-01", "copy"))
    assert store.privacy.spent_by_device("ward")["copy"] == {CHEAP: 4}
    store.record(run_id, [status("done")])
    for name in ("pi-01", "copy"):
        store.roster.revoke(name)
    store.forget_device("copy", "ann", with_others=True)
    assert sums(store) == added_up(store)
    assert sum(sum(of.values()) for of in store.privacy.spent_by_device("ward").values()) == 2 + 4


def test_a_device_that_claims_what_everyone_spent_does_not_take_it_away_when_it_is_forgotten(
    store: Store, run_id: str
) -> None:
    reserve(store, run_id, 3)  # nobody is named: everyone pays
    enrol(store, "mallory")
    claim(store, "mallory", "", "pi-02", "forgotten-0123456789abcdef")
    store.record(run_id, [status("done")])
    store.roster.revoke("mallory")
    store.forget_device("mallory", "ann")
    assert store.privacy.spent_by_device("ward", ["pi-02"])["pi-02"] == {CHEAP: 3}
    assert sums(store) == added_up(store)


def test_a_device_does_not_pay_for_a_forgotten_one_that_had_claimed_its_earlier_key(store: Store, run_id: str) -> None:
    enrol(store, "ward-1", "mallory")
    greet(store, "ward-1", 2, ["pi-01"])
    greet(store, "mallory", 2, ["pi-01"])
    reserve(store, run_id, 3, release=DEAR, devices=("mallory",))
    store.record(run_id, [status("done")])
    store.roster.revoke("mallory")
    found = store.forget_device("mallory", "ann", with_others=True)
    assert found is not None
    spent = store.privacy.spent_by_device("ward")
    assert spent == {"pi-02": {CHEAP: 2}, "ward-1": {CHEAP: 2}, found.pseudonym: {DEAR: 1}}
    assert key_of("pi-01") not in repr([sums(store), _columns(store)])
    assert sums(store) == added_up(store)


def test_a_device_that_reports_ever_other_populations_takes_no_more_room(store: Store) -> None:
    enrol(store, "mallory")
    made_up = {population_key(str(one)): 1 for one in range(MAX_POPULATIONS - 1)}
    store.roster.seen(Hello("mallory", "p1", booked=made_up | {population_key("ward"): 1}), at=1.0)
    with pytest.raises(Refused, match="has reported 1025 populations of its ledger, and may report 1024"):
        store.roster.seen(Hello("mallory", "p1", booked={population_key("another"): 1}), at=1.0)
    store.roster.seen(Hello("mallory", "p1", booked={population_key("ward"): 19}), at=1.0)
    with store._database.reading() as connection:
        booked = connection.execute(select(Device.c.booked)).scalar_one()
    assert len(booked) == MAX_POPULATIONS
    assert booked[population_key("ward")] == 19, "a population that is stored goes on"


def _columns(store: Store) -> list[object]:
    from sqlalchemy import text

    with store._database.reading() as connection:
        return list(connection.execute(text("SELECT hello, other_keys, brought FROM devices")).all())


SAMPLED, FULL = '{"rate": 0.01, "variance": 4.0}', '{"rate": 1.0, "variance": 4.0}'


@pytest.fixture
def sampled(store: Store) -> str:
    """A run of a hundred rounds with Poisson sampling, which name nobody; pi-01 was in one of them."""
    enrol(store, "pi-01", "pi-02")
    made = new_run(store)
    for number in range(1, 101):
        reserve(store, made, number, release=SAMPLED, devices=())
    report(store, "pi-01", "ward", 1)
    return made


def test_sampled_rounds_hide_no_loss_of_a_device_that_was_in_few_of_them(store: Store, sampled: str) -> None:
    """A device books the rounds alone in which it was sampled: of a hundred at rate 0.01 these are 22 at most."""
    for count in (1, 22):
        report(store, "pi-01", "ward", count)
        assert store.privacy.unknown() == {}
    report(store, "pi-01", "ward", 91)  # ninety rounds are missing in a copy of an older state directory
    with pytest.raises(DataLost, match="it is not known how much privacy") as found:
        store.privacy.spent("ward")
    assert found.value.why == "pi-01 has 91 releases of it in its own ledger, and 22 in this one"


@pytest.mark.parametrize(("rounds", "more"), [(69, {}), (169, {SAMPLED: 100})])
def test_what_devices_have_booked_is_charged_without_the_gain_of_sampling(
    store: Store, sampled: str, rounds: int, more: dict[str, int]
) -> None:
    report(store, "pi-01", "ward", 91)
    store.privacy.settle("ward", rounds, SAMPLED, "ann")
    assert store.privacy.spent("ward") == {FULL: 69, SAMPLED: 100 + sum(more.values())}
    assert store.privacy.unknown() == {}
    assert sums(store) == added_up(store)


def test_a_device_is_charged_in_full_for_rounds_in_which_it_took_part(store: Store, sampled: str) -> None:
    """It brings twelve rounds of an earlier enrolment, in which nobody's coin hides it any more."""
    enrol(store, "pi-08")
    greet(store, "pi-08", 34)
    assert store.privacy.excluded("ward")["pi-08"].endswith("settle ward --device pi-08 --rounds 12")
    store.privacy.settle("ward", 12, SAMPLED, "ann", "pi-08")
    assert store.privacy.spent_by_device("ward")["pi-08"] == {SAMPLED: 100, FULL: 12}
    assert store.privacy.excluded("ward") == store.privacy.unknown() == {}
