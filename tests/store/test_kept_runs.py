"""Tags, the archive and deleted runs in the store, and devices that are removed."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from tests.support.private_story import PrivateStory
from tests.support.server_bench import LAYOUT
from thinwire.core import RunPlan
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.events import DeviceOffline, DeviceOnline, RunStatusChanged
from thinwire.core.fleet import Hello, Joining, TaskReport
from thinwire.core.run_events import RunDeleted
from thinwire.store import Condition, MeasureRow, Store, kept_runs

PLAN = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 1')
KEYS = {"pi-1": "1" * 64, "pi-2": "2" * 64}
OF_A_RUN = ("updates", "rounds", "phases", "journal", "segments", "snapshots", "checkpoints")


def made(store: Store, status: str = "done") -> str:
    run_id = store.create_run("toy", PLAN, LAYOUT, TaskReport("toy"))
    store.record(run_id, [RunStatusChanged(store._clock.wall(), status, "")])  # type: ignore[arg-type]
    return run_id


def count(store: Store, table: str, run_id: str) -> int:
    with store._database.reading() as connection:
        found = connection.execute(text(f"SELECT count(*) FROM {table} WHERE run_id = :run"), {"run": run_id})
        return int(found.scalar_one())


def test_tags_are_added_and_removed_and_the_audit_has_who(store: Store):
    run_id = made(store)
    assert store.tag_run(run_id, ["paper", "best"], who="ann") == ["best", "paper"]
    assert store.tag_run(run_id, ["old"], ["best", "never"], who="ben") == ["old", "paper"]
    assert store.run(run_id).tags == ["old", "paper"]
    with store._database.reading() as connection:
        rows = connection.execute(text("SELECT kind, who, answered_at FROM commands ORDER BY id")).all()
    assert [(row.kind, row.who) for row in rows] == [("tag-run", "ann"), ("tag-run", "ben")]
    assert not store.commands.pending(), "nothing is left to carry out"


@pytest.mark.parametrize("tag", ["", "Paper", "a b", "x" * 33, "é", "a_b", "a\n"])
def test_a_tag_that_is_not_valid_is_refused(store: Store, tag: str):
    run_id = made(store)
    with pytest.raises(UsageError, match="is not valid"):
        store.tag_run(run_id, [tag])
    assert store.run(run_id).tags == []


def test_a_run_has_at_most_16_tags(store: Store):
    run_id = made(store)
    store.tag_run(run_id, [f"tag-{number}" for number in range(16)])
    with pytest.raises(UsageError, match="would have 17 tags"):
        store.tag_run(run_id, ["one-more"])
    assert len(store.tag_run(run_id, ["one-more"], ["tag-0"])) == 16


def test_only_a_run_that_is_over_is_archived(store: Store):
    run_id, going = made(store), made(store, "running")
    store.archive_run(run_id, True, "ann")
    assert store.run(run_id).archived_at
    store.archive_run(run_id, False, "ann")
    assert store.run(run_id).archived_at is None
    with pytest.raises(Refused, match=f"{going} is running"):
        store.archive_run(going, True)


def test_a_deleted_run_is_not_found_and_its_id_is_never_given_again(store: Store):
    first = made(store)
    last = made(store)
    store.mark_deleted(last, "ann")
    for _ in store.delete_rows(last):
        pass
    with pytest.raises(NotFound) as found:
        store.run(last)
    at = time.strftime("%Y-%m-%d", time.localtime(store._clock.wall()))
    assert (found.value.what, found.value.why.rpartition(" ")[0]) == (f"{last} was deleted", f"deleted by ann on {at}")
    assert [row.run_id for row in store.runs()] == [first]
    assert [row.run_id for row in store.runs(with_deleted=True)] == [last, first]
    assert store.run("latest").run_id == first
    assert store.run("toy").run_id == first, "a prefix means none that was deleted"
    assert made(store) == "toy-3"
    assert not any(count(store, table, last) for table in OF_A_RUN)


def test_the_number_of_an_event_is_not_given_twice_though_the_last_events_are_deleted(store: Store):
    first = made(store)
    last = made(store)
    before = store.last_seq()
    store.mark_deleted(last, "ann")
    for _ in store.delete_rows(last):
        pass
    store.record(first, [RunStatusChanged(2.0, "done", "again")])
    assert store.last_seq(first) > before
    assert [(one.run_id, one.who) for _, one in store.events(None) if isinstance(one, RunDeleted)] == [(last, "ann")]


def test_a_run_that_goes_on_is_not_deleted(store: Store):
    run_id = made(store, "running")
    with pytest.raises(Refused, match="is running"):
        store.mark_deleted(run_id, "ann")
    with pytest.raises(Refused):
        next(store.delete_rows(run_id))
    assert store.run(run_id).status == "running"


def test_the_privacy_ledger_keeps_what_a_deleted_run_has_spent(store: Store):
    story = PrivateStory(store)
    story.play()
    store.record(story.run_id, [RunStatusChanged(story.at, "done", "1 round")])
    before = store.privacy.rows()
    assert before, "the run has spent"
    store.mark_deleted(story.run_id, "ann")
    for _ in store.delete_rows(story.run_id):
        pass
    assert store.privacy.rows() == before
    assert not any(count(store, table, story.run_id) for table in OF_A_RUN)


def enrolled(store: Store, *names: str) -> None:
    for name in names:
        store.roster.enrol(name, KEYS[name], name.encode(), "loopback")


def test_a_device_that_never_worked_is_removed_and_may_come_again(store: Store):
    enrolled(store, "pi-1", "pi-2")
    assert len(store.roster.rows()) == 2
    store.remove_device("pi-1", "ann")
    assert [row.name for row in store.roster.rows()] == ["pi-2"]
    assert next((one.what, one.who) for one in store.audit.actions("pi-1")) == ("remove", "ann")
    store.remove_device("pi-2", "ann")
    assert not store.roster.rows()
    store.roster.enrol("pi-1", "3" * 64, b"another key", "loopback")
    assert [row.fingerprint for row in store.roster.rows()] == ["3" * 64]


def test_another_process_notices_that_the_last_device_was_removed_and_another_one_came(store: Store):
    enrolled(store, "pi-1")
    clock = VirtualClock()
    with Store.open(store.url, clock=clock) as other:
        assert [row.name for row in other.roster.rows()] == ["pi-1"]
        store.remove_device("pi-1")
        enrolled(store, "pi-2")
        clock.advance(2.0)
        assert [row.name for row in other.roster.rows()] == ["pi-2"]


def test_a_device_that_has_worked_is_not_removed(store: Store):
    enrolled(store, "pi-1")
    PrivateStory(store).play(("pi-1",))
    with pytest.raises(Refused) as refused:
        store.remove_device("pi-1")
    assert "thinwire devices revoke pi-1" in refused.value.hint
    assert "thinwire devices forget pi-1" in refused.value.hint
    assert [row.name for row in store.roster.rows()]


def test_a_device_that_reported_spent_privacy_is_not_removed(store: Store):
    enrolled(store, "pi-1")
    with store._database.writing() as connection:
        connection.execute(text("UPDATE devices SET booked = '{\"toy\": {}}'"))
    with pytest.raises(Refused, match="is not removed"):
        store.remove_device("pi-1")


def test_a_device_that_is_online_is_not_removed(store: Store):
    enrolled(store, "pi-1")
    store.roster.seen(Hello("pi-1", "p", (TaskReport("toy"),)), 1.0)
    with store._database.writing() as connection:
        connection.execute(text("UPDATE devices SET online = true"))
    with pytest.raises(Refused) as refused:
        store.remove_device("pi-1")
    assert "it is online" in refused.value.why


def test_a_device_that_is_not_known_is_not_found(store: Store):
    with pytest.raises(NotFound, match="no device 'pi-9'"):
        store.remove_device("pi-9")


def records(store: Store, clock: VirtualClock, name: str) -> None:
    """Record all that names a device and has an age, except what belongs to a run."""
    now = clock.wall()
    (invited,) = store.invitations.invite(names=[name], expires_s=60.0)
    store.roster.join(Joining(invited.secret, name, KEYS[name], name.encode(), "10.9.8.7"))
    store.record_device(DeviceOnline(now, name))
    store.record_device(DeviceOffline(now, name, "timeout", now))
    store.audit.note("join", "10.9.8.7", "is not invited", name)
    measured = MeasureRow(name, "rtt", "", [[1.0, 0.1]], 0.1, 0.1, now)
    store.record(made(store), [RunStatusChanged(now, "done", "")], [measured])
    store.alerts.update([Condition("too-few", name, f"{name} is missing", "")])
    store.alerts.update([])


def test_what_names_a_device_goes_with_its_age_while_actions_and_the_ledger_stay(
    store: Store, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept_runs, "DELETED_ROWS", 1)
    story = PrivateStory(store, at=clock.wall())
    story.play()
    store.record(story.run_id, [RunStatusChanged(story.at, "done", "1 round")])
    records(store, clock, "pi-1")
    clock.advance(1000.0)
    before = clock.wall()
    records(store, clock, "pi-2")
    old = store.expired_runs(before)
    assert story.run_id in old
    assert store.runs()[0].run_id not in old, "the run of the second device is over, and younger"
    ledger, actions = store.privacy.rows(), store.audit.actions()
    store.mark_deleted(story.run_id, "keep_days")
    for _ in store.delete_expired(before):
        pass
    with store._database.reading() as connection:

        def devices(table: str, column: str) -> set[str]:
            return {row[0] for row in connection.execute(text(f"SELECT {column} FROM {table}"))}

        assert devices("invitations", "name") == devices("refusal_notes", "name") == {"pi-2"}
        assert devices("measures", "device") == devices("alerts", "subject") == {"pi-2"}
    assert not store.clients(story.run_id)
    connections = [one for _, one in store.events(None) if isinstance(one, DeviceOnline | DeviceOffline)]
    assert {one.device for one in connections} == {"pi-2"}
    joined = {one.device: one.detail for one in store.audit.actions() if one.what == "join"}
    assert (joined["pi-1"], "10.9.8.7" in joined["pi-2"]) == ("", True)
    assert [(one.what, one.device) for one in store.audit.actions()] == [(one.what, one.device) for one in actions]
    assert store.privacy.rows() == ledger
    assert {row.name for row in store.roster.rows()} == {"pi-1", "pi-2"}
    clock.advance(1000.0)
    newest = store.last_seq()
    for _ in store.delete_expired(clock.wall()):
        pass
    store.record_device(DeviceOffline(clock.wall(), "pi-1", "closed"))
    assert store.last_seq() > newest, "a number of the journal was given twice"


def test_the_number_of_an_invitation_is_not_given_twice_though_all_of_them_are_too_old(store: Store):
    """The audit log stays, and tells by this number who invited which device; a page may withdraw by it, too."""
    (first,) = store.invitations.invite(names=["pi-1"], expires_s=60.0)
    for _ in store.delete_expired(first.expires_at + 1.0):
        pass
    assert [(row.id, row.name) for row in store.invitations.all()] == [(first.id, "")]
    (second,) = store.invitations.invite(names=["pi-2"], expires_s=60.0)
    assert second.id > first.id


def test_the_numbers_of_alerts_and_refusals_are_not_given_twice_though_all_are_too_old(
    store: Store, clock: VirtualClock
):
    """A message in a mailbox, or an open page, still names an alert by its number."""

    def records_one() -> tuple[int, int]:
        store.audit.note("enroll", "10.9.8.7", "it is full", "pi-1")
        store.alerts.update([Condition("disk", "", "the disk is full", "")])
        (alert,) = store.alerts.open()
        store.alerts.update([])
        with store._database.reading() as connection:
            return alert.id, int(connection.execute(text("SELECT max(id) FROM refusal_notes")).scalar_one())

    before = records_one()
    clock.advance(10.0)
    for _ in store.delete_expired(clock.wall()):
        pass
    assert not store.alerts.all() and not store.audit.notes()
    assert all(new > old for new, old in zip(records_one(), before, strict=True))
