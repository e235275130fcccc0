"""Alerts in the store: one is open at most once, messages are recorded, and a person's first look counts."""

from __future__ import annotations

import pytest

from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotFound
from thinwire.store import Condition, Store

DISK = Condition("disk", "", "the disk has 3 MB free", "free some space")
QUIET = Condition("no-progress", "digits-1", "no round has closed for 40 min")


def test_an_alert_opens_once_and_closes_with_its_condition(store: Store, clock: VirtualClock):
    for _ in range(3):
        store.alerts.update([DISK, QUIET])
        clock.advance(10)
    assert [(one.kind, one.subject) for one in store.alerts.open()] == [("disk", ""), ("no-progress", "digits-1")]
    store.alerts.update([QUIET])
    (over,) = [one for one in store.alerts.all() if one.closed_at is not None]
    assert (over.kind, over.closed_at) == ("disk", clock.wall())
    store.alerts.update([DISK, QUIET])  # it comes back: a new alert
    assert [one.id for one in store.alerts.open()] == [2, 3]


def test_what_nobody_can_judge_stays_as_it_is(store: Store):
    store.alerts.update([DISK, QUIET])
    store.alerts.update([], unknown={"no-progress"})
    assert [one.kind for one in store.alerts.open()] == ["no-progress"]


def test_each_change_has_one_message_in_order(store: Store):
    store.alerts.update([DISK])
    store.alerts.update([])  # opened and closed before anything was sent
    said = []
    while due := store.alerts.due():
        (row,) = due
        assert row.due is not None
        said.append(row.due)
        store.alerts.sent(row, row.due)
    assert said == ["opened", "closed"]


def test_a_message_that_was_not_sent_is_due_again_later_and_later(store: Store, clock: VirtualClock):
    store.alerts.update([DISK])
    waited = []
    for _ in range(9):
        (row,) = store.alerts.due()
        store.alerts.not_sent(row, "no route to host")
        before = clock.now()
        while not store.alerts.due():
            clock.advance(5)
        waited.append(clock.now() - before)
    assert waited == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    (row,) = store.alerts.due()
    assert (row.failures, row.failure) == (9, "no route to host")
    store.alerts.sent(row, "opened")
    assert store.alerts.open()[0].failures == 0


def test_each_change_of_an_alert_raises_the_number_of_changes(store: Store):
    seen = [store.alerts.counts()[2]]
    store.alerts.update([DISK])
    (row,) = store.alerts.open()
    for change in (
        lambda: store.alerts.not_sent(row, "no route to host"),
        lambda: store.alerts.sent(row, "opened"),  # the failure is counted no more
        lambda: store.alerts.acknowledge(row.id, "ann"),
        lambda: store.alerts.update([]),
        lambda: store.alerts.sent(row, "closed"),
    ):
        seen.append(store.alerts.counts()[2])
        change()
    seen.append(store.alerts.counts()[2])
    assert seen == sorted(set(seen))


def test_the_first_person_who_acknowledges_counts(store: Store):
    store.alerts.update([DISK])
    assert store.alerts.counts()[:2] == (1, 1)
    assert store.alerts.acknowledge(1, "ann").acknowledged_by == "ann"
    assert store.alerts.acknowledge(1, "bob").acknowledged_by == "ann"
    assert store.alerts.counts()[:2] == (1, 0)
    with pytest.raises(NotFound, match="no alert 7"):
        store.alerts.acknowledge(7, "ann")


def test_old_closed_alerts_go_once_their_message_is_sent_and_open_ones_stay(
    store: Store, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("thinwire.store.alerts.MAX_CLOSED", 3)
    store.alerts.update([QUIET])

    def send() -> None:
        while due := store.alerts.due():
            for row in due:
                assert row.due is not None
                store.alerts.sent(row, row.due)

    for _ in range(6):
        clock.advance(1)
        store.alerts.update([QUIET, DISK])
        store.alerts.update([QUIET])
        send()
    store.alerts.update([QUIET, DISK])
    assert [one.kind for one in store.alerts.all()] == ["disk"] * 4 + ["no-progress"]
    store.alerts.update([DISK])
    assert [(one.kind, one.due) for one in store.alerts.due()] == [("no-progress", "closed"), ("disk", "opened")]
