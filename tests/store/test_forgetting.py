"""A device that is forgotten: its name and key are nowhere in the database, and nothing else has changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import typing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, LargeBinary, String, text

from tests.store.test_privacy_ledger import enrol
from tests.support.private_story import DEVICES, PLAIN, PrivateStory
from tests.support.secure_story import four_rounds
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import Refused
from thinwire.core.events import ClientSelected, DeviceOnline, Event, RunStatusChanged
from thinwire.core.fleet import Hello, Joining
from thinwire.core.formatting import Reason
from thinwire.server.state import snapshot
from thinwire.server.state.run_state import RunState, empty_state
from thinwire.store import MeasureRow, Store, forgetting, journal
from thinwire.store.database import METADATA
from thinwire.store.device_registry import REGISTRY_READ_S
from thinwire.store.forgetting import FORGOTTEN, OWN_RULE, ROLES, Renaming
from thinwire.store.forgetting import PLAIN as NAMES_NONE
from thinwire.store.journal import KINDS

GONE, REST = DEVICES[1], (DEVICES[0], DEVICES[2])
KEY = hashlib.sha256(b"the key of " + GONE.encode()).hexdigest()


@pytest.fixture
def story(store: Store) -> PrivateStory:
    """A private and a plain run that are over, with everything that may name a device."""
    enrol(store, *REST)
    (invited,) = store.invitations.invite(names=[GONE])
    store.roster.join(Joining(invited.secret, GONE, KEY, b"the key of " + GONE.encode(), "10.9.8.7"))
    store.audit.note("join", "10.9.8.7", f"{GONE} is not invited", GONE)
    store.roster.seen(Hello(GONE, "p1"), 5.0)
    store.record_device(DeviceOnline(5.0, GONE))
    plain = PrivateStory(store, plan=PLAIN)
    plain.play()
    plain.play(REST, closes=False)
    why = [Reason("instead-of", {"device": GONE, "kind": "lost"})]
    extra = ClientSelected(plain.at, 2, "pi-09", f"{plain.run_id}.2.pi-09", 10, why=why, instead_of=GONE)
    measured = MeasureRow(GONE, "rtt", "", [[1.0, 0.1]], 0.1, 0.1, 5.0)
    store.record(plain.run_id, [extra], [measured])
    plain.end("failed", f"a round needs 3 clients ({GONE} would pass [privacy] budget)", 7)
    private = PrivateStory(store)
    for _ in range(3):
        private.play()
    private.end()
    store.revoke_device(GONE, "me", "", lambda: True)
    return private


def everything(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, with segments unpacked."""
    with store._database.reading() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(text(f"SELECT * FROM {table.name}")).mappings()]
            for table in METADATA.sorted_tables
        }


def test_neither_the_name_nor_the_key_is_in_the_file_afterwards(store: Store, story: PrivateStory, tmp_path: Path):
    if not store._database.sqlite:
        pytest.skip("the files of a server are its own")
    files = lambda: b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*sqlite3*")))  # noqa: E731
    sought = (GONE.encode(), KEY.encode(), b"10.9.8.7")
    assert all(one in files() for one in sought), "else the search is blind"
    found = store.forget_device(GONE, "me")
    assert found is not None
    assert set(found.runs) == {"digits-1", "digits-2"}
    assert not [one for one in sought if one in files()]
    assert found.pseudonym.encode() in files()
    assert all(one.encode() in files() for one in REST)


def test_the_pseudonym_stands_where_the_name_stood_and_nowhere_else(store: Store, story: PrivateStory):
    before = everything(store)
    found = store.forget_device(GONE, "me")
    assert found is not None
    after = everything(store)
    own = {"devices", "measures", "device_actions", "refusal_notes"}
    for table in before.keys() - own:
        was = [json.dumps(row, default=repr) for row in before[table]]
        expected = [one.replace(GONE, found.pseudonym).replace(KEY, found.pseudonym) for one in was]
        assert sorted(json.dumps(row, default=repr) for row in after[table]) == sorted(expected), table
    assert {row["name"] for row in after["devices"]} == set(REST)
    last = max(after["device_actions"], key=lambda row: row["id"])
    assert (last["what"], last["device"], last["who"]) == ("forget", found.pseudonym, "me")


def test_a_replay_gives_the_same_state_with_the_pseudonym(store: Store, story: PrivateStory):
    before = snapshot.serialize(replayed(story, events_of(store, story)))
    found = store.forget_device(GONE, "me")
    assert found is not None
    assert GONE in before
    events = events_of(store, story)
    whole = replayed(story, events)
    assert whole == snapshot.parse(before.replace(GONE, found.pseudonym))
    for at in range(len(events)):
        resumed = snapshot.parse(snapshot.serialize(replayed(story, events[:at])))
        assert replayed(story, events[at:], resumed) == whole, f"a snapshot before event {at}, and the tail"


def events_of(store: Store, story: PrivateStory) -> list[Event]:
    return [event for _, event in store.events(story.run_id)]


def replayed(story: PrivateStory, events: list[Event], state: RunState | None = None) -> RunState:
    """The state of a run after these events."""
    state = state or empty_state(story.parsed)
    for event in events:
        state.apply(event)
    return state


def test_spending_stays_and_the_epsilon_of_the_run_is_the_same(store: Store, story: PrivateStory):
    before = store.privacy.spent_by_device("digits")
    found = store.forget_device(GONE, "me")
    assert found is not None
    after = store.privacy.spent_by_device("digits")
    assert after.pop(found.pseudonym) == before.pop(GONE)
    assert after == before


def test_packed_events_are_replaced_too(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "SEGMENT_EVENTS", 50)
    enrol(store, *DEVICES)
    plain = PrivateStory(store, plan=PLAIN)
    while store.last_seq(plain.run_id) < 3 * journal.SEGMENT_EVENTS:
        plain.play()
    plain.end()
    numbers = [seq for seq, _ in store.events(plain.run_id)]
    before = [repr(event) for _, event in store.events(plain.run_id)]
    store.roster.revoke(GONE, "me")
    found = store.forget_device(GONE, "me")
    assert found is not None
    assert [seq for seq, _ in store.events(plain.run_id)] == numbers
    assert [repr(event) for _, event in store.events(plain.run_id)] == [
        one.replace(GONE, found.pseudonym) for one in before
    ]


def test_a_device_that_may_still_take_part_is_not_forgotten(store: Store):
    enrol(store, *DEVICES)
    with pytest.raises(Refused, match="is approved"):
        store.forget_device(GONE, "me")
    running = PrivateStory(store)
    running.play(closes=False)
    store.roster.revoke(GONE, "me")
    before = everything(store)
    with pytest.raises(Refused, match=f"{GONE} is named in {running.run_id}, which is not over"):
        store.forget_device(GONE, "me")
    assert everything(store) == before


def test_a_running_aggregator_notices_the_next_change_of_a_device(store: Store, story: PrivateStory, address: str):
    store.roster.enrol("late", "ab" * 32, b"late", "manual")
    store.revoke_device(GONE, "me", "", lambda: False)  # the last change
    now = VirtualClock()
    with Store.open(address, clock=now) as aggregator:
        assert aggregator.roster.revoked() == {GONE}
        store.forget_device(GONE, "me")
        store.roster.approve("late")
        now.advance(REGISTRY_READ_S + 1)
        assert aggregator.roster.revoked() == set()
        assert {row.name: row.state for row in aggregator.roster.rows()} == dict.fromkeys((*REST, "late"), "approved")


def test_it_may_be_typed_again(store: Store, story: PrivateStory):
    assert store.forget_device(GONE, "me") is not None
    before = everything(store)
    assert store.forget_device(GONE, "me") is None
    assert everything(store) == before
    assert store.forget_device("never-here", "me") is None


def test_a_crash_in_the_middle_changes_nothing(store: Store, story: PrivateStory, monkeypatch: pytest.MonkeyPatch):
    before = everything(store)
    for place in ("_own_rows", "_journal", "_table", "act"):
        with monkeypatch.context() as patched:
            real = getattr(forgetting, place)

            def dies(*given: Any, real: Any = real) -> None:
                real(*given)
                raise MemoryError

            patched.setattr(forgetting, place, dies)
            with pytest.raises(MemoryError):
                store.forget_device(GONE, "me")
        assert everything(store) == before, place
    assert store.forget_device(GONE, "me") is not None


def test_earlier_names_go_too_unless_another_device_has_them(store: Store, story: PrivateStory):
    store.roster.rename(GONE, "ward-9", "me")
    store.roster.rename(REST[0], GONE, "me")
    found = store.forget_device("ward-9", "me")
    assert found is not None
    assert found.kept_names == (GONE,)
    store.roster.revoke(GONE, "me")
    found = store.forget_device(GONE, "me")
    assert found is not None
    left = json.dumps(everything(store), default=repr)
    assert GONE not in left
    assert "ward-9" not in left
    assert REST[0] not in left


def test_a_secure_run_names_no_forgotten_device(store: Store):
    secure = four_rounds(store)
    store.record(secure.run_id, [RunStatusChanged(secure.at, "stopped", "is stopped")])
    found = store.forget_device("pi-03", "me")
    assert found is not None
    assert found.runs == (secure.run_id,)
    left = json.dumps(everything(store), default=repr)
    assert "pi-03" not in left
    assert "pi-07" in left


@pytest.mark.parametrize("name", ["loss", "all", "train", "busy", "frame", "rtt"])
def test_a_device_that_is_called_as_a_metric_or_a_code_changes_neither(name: str):
    def event(one: str) -> dict[str, Any]:
        """An event about the device `one`, beside codes and metrics that are called as it was."""
        return {
            "device": one, "reason": name, "kind": name, "metrics": {name: 1.0}, "assignments": {one: f"r-1.1.{one}"},
            "reasons": {"x": [[name, {"devices": f"{one}, y"}]]}, "names": [name], "text": f"{name}-2 or {one}",
            "header": {"metrics": {name: 1}, "update_id": f"r/{one}/3"}, "clipped": {f"r/{one}/3": [name]},
            "dropped": [f"r/{one}/3", one],
        }  # fmt: skip

    made = Renaming({name: FORGOTTEN + "1"})
    assert made.fields(event(name)) == event(FORGOTTEN + "1")


def texts(kind: type[Event]) -> set[str]:
    """The fields of an event that may hold text."""
    hints = typing.get_type_hints(kind)
    numbers = {int, float, bool, int | None, float | None}
    return {field.name for field in dataclasses.fields(kind) if hints[field.name] not in numbers}


def test_each_field_with_text_has_a_role_or_names_no_device():
    known = ROLES.keys() | NAMES_NONE
    assert {name for kind in KINDS.values() for name in texts(kind)} <= known
    columns = {
        column.name
        for table in METADATA.sorted_tables if table.name not in OWN_RULE
        for column in table.c if isinstance(getattr(column.type, "impl", column.type), String | JSON | LargeBinary)
    }  # fmt: skip
    assert columns - known == set()
    assert not ROLES.keys() & NAMES_NONE


def test_sqlite_keeps_no_freed_page(store: Store, story: PrivateStory):
    if not store._database.sqlite:
        pytest.skip("a server vacuums by itself")
    store.forget_device(GONE, "me")
    with sqlite3.connect(str(store._database.url.database)) as raw:
        assert raw.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_what_was_done_with_users_and_tokens_keeps_its_words_if_a_device_was_called_alike(store: Store):
    store.users.add("anna", "viewer", "correct horse battery", "me")
    token = store.tokens.make("nightly", "anna", "viewer")
    store.tokens.revoke(token.row.id, "me")
    kept = [one for one in store.audit.actions() if one.device == ""]
    for name in ("anna", "token", "viewer"):
        enrol(store, name)
        store.revoke_device(name, "me", "", lambda: True)
        store.forget_device(name, "me")
    assert [one for one in store.audit.actions() if one.device == ""] == kept
    assert len(kept) == 3
