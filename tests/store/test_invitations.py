from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import text

from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotFound, NotInvited, Refused, UsageError
from thinwire.core.fleet import DeviceRow, Joining
from thinwire.store import Store

DAY_S = 24 * 3600.0


def joining(secret: str, name: str = "pi-01", key: str = "a key") -> Joining:
    return Joining(secret, name, hashlib.sha256(key.encode()).hexdigest(), key.encode(), "192.0.2.7:40000")


def secret(store: Store, **how: object) -> str:
    return store.invitations.invite(**how)[0].secret  # type: ignore[arg-type]  # a test says what it needs


def why_not(store: Store, wanted: Joining) -> str:
    with pytest.raises(NotInvited) as refused:
        store.roster.join(wanted)
    assert refused.value.exit_code == 5
    return refused.value.why


def test_an_invited_key_is_approved_under_its_name(store: Store, clock: VirtualClock) -> None:
    row = store.roster.join(joining(secret(store)))
    assert row == DeviceRow("pi-01", row.fingerprint, b"a key", "approved", "invitation", clock.wall())
    assert store.roster.rows() == [row]
    (invitation,) = store.invitations.all()
    assert (invitation.state, invitation.used_by, invitation.used_at) == ("used", "pi-01", clock.wall())


def test_the_database_never_holds_a_secret(store: Store) -> None:
    given = secret(store)
    assert len(bytes.fromhex(given)) == 16
    store.roster.join(joining(given))
    with store._database.reading() as connection:
        for table in ("invitations", "device_actions", "refusal_notes", "devices"):
            assert given not in str(connection.execute(text(f"SELECT * FROM {table}")).all())


def test_an_answer_that_was_lost_is_given_again_and_burns_nothing(store: Store, clock: VirtualClock) -> None:
    given = secret(store, expires_s=60)
    row = store.roster.join(joining(given))
    clock.advance(3600)
    assert store.roster.join(joining(given)) == store.roster.join(joining(given, name="pi-02")) == row
    store.roster.revoke("pi-01")
    assert store.roster.join(joining(given)).state == "revoked"
    assert len(store.roster.rows()) == 1


def test_another_key_is_refused_with_a_reason_for_the_operator_alone(store: Store, clock: VirtualClock) -> None:
    used, late, withdrawn = (invited.secret for invited in store.invitations.invite(3, expires_s=60))
    store.roster.join(joining(used))
    store.invitations.withdraw(3, who="ann")
    assert why_not(store, joining(used, "pi-02", "another")) == "used by pi-01 (invitation 1)"
    assert why_not(store, joining(withdrawn, "pi-02", "another")) == "withdrawn (invitation 3)"
    clock.advance(60)
    assert why_not(store, joining(late, "pi-02", "another")) == "expired (invitation 2)"
    for stranger in ("0" * 32, "", "\udcff", "é" * 40, "f" * 100_000):
        assert why_not(store, joining(stranger)) == "unknown"
    assert [row.state for row in store.invitations.all()] == ["used", "expired", "withdrawn"]
    assert [row.name for row in store.roster.rows()] == ["pi-01"]


def test_refusals_read_alike_but_for_the_reason(store: Store) -> None:
    given = secret(store)
    store.invitations.withdraw(1)
    said = set()
    for one in (given, "0" * 32):
        with pytest.raises(NotInvited) as refused:
            store.roster.join(joining(one))
        said.add((refused.value.what, refused.value.hint))
    assert len(said) == 1


def test_a_taken_name_is_refused_and_the_invitation_stays_good(store: Store) -> None:
    store.roster.enrol("pi-01", "e" * 64, b"first", "loopback")
    given = secret(store)
    with pytest.raises(Refused, match="another key") as refused:
        store.roster.join(joining(given))
    assert not isinstance(refused.value, NotInvited)
    with pytest.raises(Refused, match="no name"):
        store.roster.join(joining(given, name="Pi 1"))
    assert store.invitations.all()[0].state == "open"
    assert store.roster.join(joining(given, name="pi-02")).name == "pi-02"


def test_without_a_good_invitation_nobody_learns_which_names_are_taken(store: Store) -> None:
    store.roster.enrol("pi-01", "e" * 64, b"first", "loopback")
    assert why_not(store, joining("0" * 32)) == "unknown"


def test_an_invitation_for_one_name_lets_no_other_in(store: Store) -> None:
    one, two = store.invitations.invite(names=["pi-07", "pi-08"])
    assert (one.name, two.name) == ("pi-07", "pi-08")
    with pytest.raises(Refused, match="pi-01 does not belong") as refused:
        store.roster.join(joining(one.secret))
    assert refused.value.hint == "--name pi-07"
    assert store.roster.join(joining(one.secret, name="pi-07")).name == "pi-07"
    assert [row.state for row in store.invitations.all()] == ["used", "open"]


def test_invitations_for_names_that_cannot_be_are_not_made_at_all(store: Store) -> None:
    store.roster.enrol("pi-01", "e" * 64, b"first", "loopback")
    with pytest.raises(Refused, match="called pi-01"):
        store.invitations.invite(names=["pi-00", "pi-01"])
    for names in (["pi-02", "Pi 3"], ["pi-02", "pi-02"], ["a" * 64]):
        with pytest.raises(UsageError):
            store.invitations.invite(names=names)
    for count, seconds in ((0, 60.0), (-1, 60.0), (10_001, 60.0), (1, 0.0), (1, 367 * DAY_S), (1, float("nan"))):
        with pytest.raises(UsageError):
            store.invitations.invite(count, expires_s=seconds)
    assert store.invitations.all() == []


def test_a_device_that_a_person_must_approve_waits(store: Store) -> None:
    given = secret(store, approve_manually=True)
    assert store.roster.join(joining(given)).state == "pending"
    store.roster.approve("pi-01", who="ann")
    assert store.roster.join(joining(given)).state == "approved"


def test_an_invitation_lifts_who_came_over_loopback_or_waits_and_no_one_else(store: Store) -> None:
    known = joining("")
    store.roster.enrol("pi-01", known.fingerprint, known.public_key, "loopback")
    by_hand, at_once, third, fourth = (
        secret(store, approve_manually=True), secret(store), secret(store), secret(store)
    )  # fmt: skip
    lifted = store.roster.join(joining(by_hand))
    assert (lifted.how, lifted.state) == ("invitation", "pending")
    assert store.roster.join(joining(at_once)).state == "approved"
    assert store.roster.join(joining(third)).state == "approved"
    store.roster.revoke("pi-01")
    with pytest.raises(Refused, match="revoked"):
        store.roster.join(joining(fourth))
    with pytest.raises(Refused, match="this key is pi-01's"):
        store.roster.join(joining(fourth, name="pi-09"))
    assert [row.state for row in store.invitations.all()] == ["used", "used", "open", "open"]


def test_a_used_invitation_cannot_be_withdrawn_and_an_unknown_one_is_not_found(store: Store) -> None:
    store.roster.join(joining(secret(store)))
    with pytest.raises(Refused, match="pi-01") as refused:
        store.invitations.withdraw(1)
    assert "revoke pi-01" in refused.value.hint
    with pytest.raises(NotFound):
        store.invitations.withdraw(99)


def test_fifty_joins_at_once_on_one_invitation_give_one_row(store: Store, address: str, clock: VirtualClock) -> None:
    given = secret(store)
    begin = threading.Barrier(50)
    with Store.open(address, clock=clock) as another, ThreadPoolExecutor(50) as threads:

        def come(number: int) -> str:
            begin.wait()
            try:
                api = (store, another)[number % 2]
                return api.roster.join(joining(given, f"pi-{number}", f"key {number}")).name
            except NotInvited as refused:
                return refused.why

        said = list(threads.map(come, range(50)))
    (row,) = store.roster.rows()
    assert sorted(said) == sorted([row.name, *[f"used by {row.name} (invitation 1)"] * 49])


def test_fifty_lost_answers_of_one_key_give_one_row(store: Store, address: str, clock: VirtualClock) -> None:
    given = secret(store)
    with Store.open(address, clock=clock) as another, ThreadPoolExecutor(50) as threads:
        doors = (store, another)
        rows = set(threads.map(lambda n: doors[n % 2].roster.join(replace(joining(given), address=str(n))), range(50)))
    assert rows == set(store.roster.rows())
    assert len(rows) == 1


def test_the_invitation_of_a_removed_device_is_refused_to_its_key(store: Store) -> None:
    given = secret(store)
    store.roster.join(joining(given))
    store.remove_device("pi-01")
    assert why_not(store, joining(given)) == "used by pi-01, which was removed (invitation 1)"
    assert store.roster.join(joining(secret(store))).state == "approved"
