from __future__ import annotations

import hashlib

import pytest

from tests.support.store_story import accepted, closed, header, new_run, opened, status
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.events import UpdateAggregated
from thinwire.core.fleet import Joining
from thinwire.core.formatting import grouped
from thinwire.store import Store, by_todays_name
from thinwire.store.audit import NOTES

KEYS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("pi-01", "pi-02", "pi-03")}


@pytest.fixture
def known(store: Store) -> Store:
    for name, fingerprint in KEYS.items():
        store.roster.enrol(name, fingerprint, name.encode(), "loopback")
    return store


def states(store: Store) -> dict[str, str]:
    return {row.name: row.state for row in store.roster.rows()}


def said(store: Store, name: str | None = None) -> list[tuple[str, str, str, str]]:
    return [(action.who, action.device, action.what, action.detail) for action in store.audit.actions(name)]


def test_who_is_revoked_is_known_until_it_is_approved_again(known: Store) -> None:
    assert known.roster.revoked() == set()
    known.roster.revoke("pi-02")
    known.roster.leave("pi-03")
    assert known.roster.revoked() == {"pi-02", "pi-03"}
    known.roster.approve("pi-02")
    assert known.roster.revoked() == {"pi-03"}


# Who did what.


def test_every_change_of_a_device_says_who_made_it_and_when(store: Store, clock: VirtualClock) -> None:
    given = store.invitations.invite(2, approve_manually=True, who="ann")
    store.roster.join(Joining(given[0].secret, "pi-01", KEYS["pi-01"], b"key", "192.0.2.7:40000"))
    store.roster.approve("pi-01", who="ann")
    store.roster.revoke("pi-01", who="bob")
    store.roster.rename("pi-01", "pi-09", who="bob")
    assert store.roster.tag("pi-09", ["ward", "arm"], who="ann") == ["arm", "ward"]
    assert store.roster.tag("pi-09", ["ward"], ["arm", "never"], who="ann") == ["ward"]
    assert store.roster.tag("pi-09", ["ward"], who="bob") == ["ward"], "nothing changes, and nothing is recorded"
    store.roster.approve("pi-09", who="ann")
    store.roster.leave("pi-09")
    clock.advance(5)
    store.invitations.withdraw(2, who="bob")
    key = f"key {grouped(KEYS['pi-01'])}"
    assert said(store)[::-1] == [
        ("ann", "", "invite", "invitations 1 to 2, for 24 h, to be approved by hand"),
        ("pi-01", "pi-01", "join", "invitation 1, from 192.0.2.7:40000, pending"),
        ("ann", "pi-01", "approve", key),
        ("bob", "pi-01", "revoke", ""),
        ("bob", "pi-09", "rename", "was pi-01"),
        ("ann", "pi-09", "tag", "+arm +ward"),
        ("ann", "pi-09", "tag", "-arm"),
        ("ann", "pi-09", "approve", key),
        ("pi-09", "pi-09", "leave", ""),
        ("bob", "", "withdraw", "invitation 2"),
    ]
    assert [action.at - clock.origin for action in store.audit.actions(limit=2)] == [5.0, 0.0]
    past = ["join", "approve", "revoke", "rename", "tag", "tag", "approve", "leave"]
    assert [what for _, _, what, _ in said(store, "pi-09")][::-1] == past


def test_a_past_goes_with_the_device_and_not_with_the_name_that_another_one_took_over(store: Store) -> None:
    def came(name: str, key: str) -> None:
        store.roster.join(Joining(store.invitations.invite()[0].secret, name, key, b"key of " + name.encode(), ""))

    came("pi-01", KEYS["pi-01"])
    store.roster.leave("pi-01")
    store.roster.rename("pi-01", "old")
    came("pi-01", KEYS["pi-02"])
    store.roster.rename("old", "older")
    store.roster.revoke("pi-01")
    assert [what for _, _, what, _ in said(store, "pi-01")] == ["revoke", "join"]
    assert [what for _, _, what, _ in said(store, "older")] == ["rename", "rename", "leave", "join"]
    assert said(store, "old") == []
    actions = store.audit.actions()
    assert [name for name, one in by_todays_name(actions) if one.what != "invite"] == [
        "pi-01", "older", "pi-01", "older", "older", "older",
    ]  # fmt: skip


def test_what_changes_nothing_is_not_written_down(known: Store) -> None:
    before = said(known)
    with pytest.raises(NotFound):
        known.roster.revoke("pi-77")
    with pytest.raises(Refused):
        known.roster.rename("pi-01", "pi-02")
    known.roster.rename("pi-01", "pi-01")
    known.roster.enrol("pi-01", KEYS["pi-01"], b"pi-01", "loopback")
    assert said(known) == before


# Approving.


def test_what_a_person_approves_counts_on_a_device_api_with_tls_too(known: Store) -> None:
    known.roster.approve("pi-01")
    assert {row.name: row.how for row in known.roster.rows()} == {
        "pi-01": "manual", "pi-02": "loopback", "pi-03": "loopback",
    }  # fmt: skip


@pytest.mark.parametrize("decide", ["approve", "revoke"])
def test_a_decision_about_one_key_does_not_fall_on_another_of_its_name(known: Store, decide: str) -> None:
    """Between what a person saw and what they say, a name may have gone to another device."""
    before, rows = said(known), known.roster.rows()
    with pytest.raises(Refused, match="another key"):
        getattr(known.roster, decide)("pi-01", "dashboard", KEYS["pi-02"])
    assert (said(known), known.roster.rows()) == (before, rows)
    getattr(known.roster, decide)("pi-01", "dashboard", KEYS["pi-01"])


def test_an_approval_takes_back_a_command_that_nobody_has_carried_out(known: Store) -> None:
    first, second = (known.revoke_device(name, "ann", "", lambda: True) for name in ("pi-01", "pi-02"))
    assert first is not None
    known.roster.rename("pi-01", "pi-11")  # the command is about the key
    known.roster.approve("pi-11")
    assert known.commands.result(first) == {"done": False, "why": "approved again"}
    assert [command.id for command in known.commands.pending()] == [second]


# A key that a person brings.


def test_a_key_that_a_person_brings_is_approved_by_that(store: Store) -> None:
    row = store.roster.add("node-1", b"der", "stock", who="ann")
    assert (row.state, row.how, row.fingerprint) == ("approved", "stock", hashlib.sha256(b"der").hexdigest())
    store.roster.revoke("node-1")
    assert store.roster.add("node-1", b"der", "stock").state == "approved"
    with pytest.raises(Refused, match="another key"):
        store.roster.add("node-1", b"other", "stock")
    with pytest.raises(Refused, match="this key is node-1's"):
        store.roster.add("node-2", b"der", "stock")
    with pytest.raises(Refused, match="there already"):
        store.roster.add("node-1", b"der", "manual")
    with pytest.raises(UsageError):
        store.roster.add("Node 1", b"new", "stock")


# Leaving.


def test_who_leaves_is_revoked_until_a_person_approves_it(known: Store) -> None:
    known.roster.leave("pi-01")
    assert states(known)["pi-01"] == "revoked"
    known.roster.approve("pi-01")
    assert states(known)["pi-01"] == "approved"


# What stays in the model.


def test_the_rounds_in_which_a_device_was_aggregated_are_known(known: Store) -> None:
    first, sim, second = new_run(known), new_run(known, source="sim"), new_run(known)
    for run_id in (first, sim):
        for number in (1, 2):
            known.record(run_id, opened(run_id, number))
            known.record(
                run_id,
                [accepted(header(run_id, number, "pi-01"), number), closed(number, [f"{run_id}/pi-01/{number}"])],
            )
    known.record(second, opened(second, 1))
    late = header(second, 1, "pi-01")
    known.record(
        second,
        [closed(1, []), *opened(second, 2), accepted(late, 1, 2), UpdateAggregated(9.0, 2, str(late.update_id), 0.1)],
    )
    known.record(second, [accepted(header(second, 2, "pi-02"), 2)])
    assert known.aggregated_rounds("pi-01") == [(first, [1, 2]), (second, [2])]
    assert known.aggregated_rounds("pi-02") == known.aggregated_rounds("nobody") == []


# Another name.


def test_a_renamed_device_takes_its_past_with_it(known: Store) -> None:
    run_id, sim = new_run(known), new_run(known, source="sim")
    for run in (run_id, sim):
        known.record(run, opened(run, 1))
        known.record(run, [accepted(header(run, 1, "pi-01"), 1), closed(1, [f"{run}/pi-01/1"]), status("done")])
    known.roster.rename("pi-01", "ward-3")
    assert sorted(states(known)) == ["pi-02", "pi-03", "ward-3"]
    row = known.roster.by_fingerprint(KEYS["pi-01"])
    assert row is not None
    assert row.name == "ward-3"
    assert known.aggregated_rounds("ward-3") == [(run_id, [1])]
    assert [client.device for client in known.clients(run_id)] == ["pi-02", "pi-03", "ward-3"]
    assert [client.device for client in known.clients(sim)] == ["pi-01", "pi-02", "pi-03"]
    assert {info.row.name: info.updates for info in known.devices()} == {"pi-02": 0, "pi-03": 0, "ward-3": 1}


def test_the_name_of_an_invitation_that_was_used_follows_its_device(store: Store) -> None:
    (given,) = store.invitations.invite()
    joining = Joining(given.secret, "pi-01", KEYS["pi-01"], b"key", "")
    store.roster.join(joining)
    store.roster.rename("pi-01", "ward-3")
    assert store.invitations.all()[0].used_by == "ward-3"
    assert store.roster.join(joining).name == "ward-3"


def test_a_device_is_not_renamed_while_a_run_that_is_not_over_has_selected_it(known: Store) -> None:
    run_id = new_run(known)
    known.record(run_id, [status("running"), *opened(run_id, 1, ("pi-01",))])
    with pytest.raises(Refused, match=run_id) as refused:
        known.roster.rename("pi-01", "ward-3")
    assert f"runs stop {run_id}" in refused.value.hint
    known.roster.rename("pi-02", "ward-2")
    known.record(run_id, [status("stopped")])
    known.roster.rename("pi-01", "ward-3")
    assert sorted(states(known)) == ["pi-03", "ward-2", "ward-3"]


def test_a_name_that_cannot_be_given_is_refused(known: Store) -> None:
    with pytest.raises(Refused, match="called pi-02"):
        known.roster.rename("pi-01", "pi-02")
    with pytest.raises(UsageError):
        known.roster.rename("pi-01", "Ward 3")
    with pytest.raises(NotFound):
        known.roster.rename("pi-77", "ward-3")


# What the device API refused.


def test_the_newest_thousand_refusals_are_kept(store: Store, clock: VirtualClock) -> None:
    store.roster.note("invitation", "192.0.2.7:40000", "expired (invitation 3)", "pi-03")
    assert [(n.kind, n.address, n.why, n.name, n.at) for n in store.audit.notes()] == [
        ("invitation", "192.0.2.7:40000", "expired (invitation 3)", "pi-03", clock.wall())
    ]
    columns = "at, kind, address, name, why"
    with store._database.writing() as connection:
        for _ in range(11):  # the one that is there, 2048 times
            connection.exec_driver_sql(f"INSERT INTO refusal_notes ({columns}) SELECT {columns} FROM refusal_notes")
    store.roster.note("key", "a" * 5000, "\0 unknown \udcff", "n" * 5000)
    assert len(store.audit.notes(10_000)) == NOTES
    newest = store.audit.notes(1)[0]
    assert (newest.kind, len(newest.address), newest.why, len(newest.name)) == ("key", 100, "? unknown ?", 63)


# What the dashboard reads of devices.


def test_the_updates_of_a_device_come_newest_first_over_all_runs_on_devices(known: Store) -> None:
    assert known.device_updates("pi-01") == []
    for source in ("devices", "sim", "devices"):
        run_id = new_run(known, source=source)
        known.record(run_id, [*opened(run_id, 1), *opened(run_id, 2)])
    found = [(row.device, row.run_id, row.round) for row in known.device_updates("pi-01", limit=3)]
    assert found == [("pi-01", "digits-3", 2), ("pi-01", "digits-1", 2), ("pi-01", "digits-3", 1)]


def test_one_number_tells_of_every_change_of_the_roster_every_refusal_and_every_command(store: Store) -> None:
    numbers = [store.audit.last()]

    def changed() -> bool:
        numbers.append(store.audit.last())
        return numbers[-1] > numbers[-2]

    assert numbers == [0]
    invited = store.invitations.invite()[0]
    assert changed()
    store.roster.note("invitation", "192.0.2.9", "unknown")
    assert changed()
    store.roster.join(Joining(invited.secret, "pi-01", KEYS["pi-01"], b"key", "192.0.2.7:40000"))
    assert changed()
    store.roster.revoke("pi-01")
    assert changed()
    store.commands.add("stop-service")
    assert changed()
    assert not changed()
