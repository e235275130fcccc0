"""Users, their sessions and their tokens: who may do what, until when, and what the database holds of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import text

from tests.support.store_story import new_run
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotFound, Refused, ThinwireError, UsageError
from thinwire.store import MACHINE, Person, Store, users

GOOD = "an owl in the 7th tower"
OTHER = "a mole under the 8th tree"


@pytest.fixture
def anna(store: Store) -> str:
    store.users.add("anna", "operator", GOOD, "root")
    return "anna"


def session(store: Store, name: str, password: str = GOOD) -> str:
    token = store.users.log_in(name, password)
    assert token is not None
    return token


def test_a_user_logs_in_with_the_password_only(store: Store, anna: str) -> None:
    assert store.logins.person(session(store, anna)) == Person("anna", "operator", store._clock.wall())
    for name, password in (
        ("anna", OTHER),
        ("anna", ""),
        ("bert", GOOD),
        ("", ""),
        ("anna\x00", GOOD),
        ("anna", "\ud800"),
        ("ANNA", GOOD),
    ):
        assert store.users.log_in(name, password) is None


def test_a_wrong_password_costs_one_check_whether_or_not_the_user_exists(
    store: Store, anna: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    class Counting:
        def verify(self, password: bytes, kept: str) -> bool:
            checked.append(kept)
            return False

        def hash(self, _: object) -> str:
            return "of nobody"

    monkeypatch.setattr(users, "_hasher", Counting)
    for name in ("anna", "nobody", ""):
        checked.clear()
        assert store.users.log_in(name, OTHER) is None
        assert len(checked) == 1, name


def test_the_hash_of_nobody_has_the_cost_of_every_other_hash() -> None:
    hashes = (users._of_nobody(), users.hash_password(GOOD))
    costs = {re.findall(r"^\$argon2id\$v=\d+\$[^$]+\$", one)[0] for one in hashes}
    assert len(costs) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.users.set_password("anna", OTHER, "anna"),
        lambda store: store.users.set_role("anna", "admin", "root"),
        lambda store: store.users.disable("anna", "root"),
    ],
    ids=["password", "role", "disabled"],
)
def test_a_change_ends_all_sessions_of_the_user_and_of_nobody_else(store: Store, anna: str, change: Any) -> None:
    store.users.add("bert", "viewer", OTHER, "root")
    sessions, others = [session(store, anna) for _ in range(2)], [session(store, "bert", OTHER)]
    others.append(store.logins.redeem(store.logins.new_code()) or "")
    change(store)
    assert [store.logins.valid(one) for one in (*sessions, *others)] == [False, False, True, True]


def test_all_sessions_of_a_user_end_also_those_by_code(store: Store, anna: str) -> None:
    by_code = store.logins.redeem(store.logins.new_code())
    assert by_code is not None
    theirs = session(store, anna)
    store.users.log_out(MACHINE, "root")
    assert (store.logins.valid(by_code), store.logins.valid(theirs)) == (False, True)
    store.users.log_out(anna, "root")
    assert not store.logins.valid(theirs)
    assert session(store, anna), "the password is the same"
    with pytest.raises(NotFound):
        store.users.log_out("bert", "root")
    ended = [(row.who, row.detail) for row in store.audit.rows()[1] if row.what == "log out user"]
    assert sorted(ended) == [("root", anna), ("root", MACHINE)]


def test_a_disabled_user_cannot_log_in_until_enabled(store: Store, anna: str) -> None:
    store.users.disable(anna, "root")
    assert store.users.log_in(anna, GOOD) is None
    store.users.enable(anna, "root")
    assert store.users.log_in(anna, GOOD)


def test_a_session_is_confirmed_by_the_password_again(store: Store, clock: VirtualClock, anna: str) -> None:
    token = session(store, anna)
    clock.advance(3600.0)
    assert not store.users.confirm(token, anna, OTHER)
    assert clock.wall() - store.logins.person(token).confirmed_at == 3600.0  # type: ignore[union-attr]
    assert store.users.confirm(token, anna, GOOD)
    assert store.logins.person(token).confirmed_at == clock.wall()  # type: ignore[union-attr]
    store.logins.end(token)
    assert not store.users.confirm(token, anna, GOOD)


def test_the_session_of_a_code_is_confirmed_by_another_code(store: Store, clock: VirtualClock) -> None:
    code = store.logins.new_code()
    token = store.logins.redeem(code) or ""
    assert store.logins.person(token) == Person(MACHINE, "admin", clock.wall())
    clock.advance(60.0)
    assert not store.logins.confirm(token, code)
    assert store.logins.confirm(token, store.logins.new_code())
    assert store.logins.person(token).confirmed_at == clock.wall()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["", "Anna", "anna b", "-anna", "a" * 33, "machine", "operator", "<b>", "anna\n", "ä"])
def test_a_name_that_could_be_mistaken_is_refused(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        store.users.add(name, "viewer", GOOD, "root")
    assert store.users.all() == []


@pytest.mark.parametrize("password", ["", "short", "x" * 400, "aaaaaaaaaaaaaaaa", "annaannaanna2026"])
def test_a_password_that_is_easy_to_guess_is_refused(store: Store, anna: str, password: str) -> None:
    with pytest.raises(UsageError):
        store.users.set_password(anna, password, "root")
    assert store.users.log_in(anna, GOOD)


def test_a_name_belongs_to_one_person(store: Store, anna: str) -> None:
    store.users.disable(anna, "root")
    with pytest.raises(Refused):
        store.users.add("anna", "admin", OTHER, "root")
    with pytest.raises(NotFound):
        store.users.set_role("bert", "admin", "root")
    with pytest.raises(UsageError):
        store.users.add("bert", "owner", OTHER, "root")


def test_there_is_an_admin_when_one_may_log_in(store: Store, anna: str) -> None:
    assert not store.users.has_admin()
    store.users.set_role(anna, "admin", "root")
    assert store.users.has_admin()


def test_the_last_admin_stays_one(store: Store, anna: str) -> None:
    store.users.set_role(anna, "admin", "root")
    token = session(store, anna)
    for change in (lambda: store.users.disable(anna, "root"), lambda: store.users.set_role(anna, "viewer", "root")):
        with pytest.raises(Refused):
            change()
    assert store.logins.valid(token)
    store.users.add("bert", "admin", OTHER, "root")
    store.users.disable(anna, "root")
    assert store.users.has_admin()
    with pytest.raises(Refused):
        store.users.disable("bert", "root")


def test_a_token_acts_for_its_user_until_it_expires(store: Store, clock: VirtualClock, anna: str) -> None:
    made = store.tokens.make("nightly", anna, "viewer", expires_s=100.0)
    assert made.secret.startswith("tw_")
    assert store.tokens.person(made.secret) == Person("anna", "viewer", token=made.row.id)
    assert store.tokens.all()[0].used_at == clock.wall()
    for wrong in ("", "tw_", made.secret[:-1], made.secret + "x", made.secret[3:], "tw_\ud800"):
        assert store.tokens.person(wrong) is None
    clock.advance(100.0)
    assert store.tokens.person(made.secret) is None


def test_a_token_may_do_no_more_than_its_user_may_now(store: Store, anna: str) -> None:
    with pytest.raises(Refused):
        store.tokens.make("more", anna, "admin")
    secret = store.tokens.make("as i", anna, "operator").secret
    store.users.set_role(anna, "viewer", "root")
    assert store.tokens.person(secret).role == "viewer"  # type: ignore[union-attr]
    store.users.disable(anna, "root")
    assert store.tokens.person(secret) is None
    with pytest.raises(NotFound):
        store.tokens.make("late", anna, "viewer")
    assert store.tokens.person(store.tokens.make("of the machine", MACHINE, "admin").secret)


def test_a_revoked_token_is_refused_at_once_and_another_s_is_not_found(store: Store, anna: str) -> None:
    store.users.add("bert", "viewer", OTHER, "root")
    made = store.tokens.make("nightly", anna, "viewer")
    with pytest.raises(NotFound):
        store.tokens.revoke(made.row.id, "bert", "bert")
    assert store.tokens.all("bert") == []
    store.tokens.revoke(made.row.id, "anna", "anna")
    assert store.tokens.person(made.secret) is None
    assert store.tokens.all() == []
    with pytest.raises(NotFound):
        store.tokens.revoke(made.row.id, "root")


@pytest.mark.parametrize("change", ["reset", "disable"])
def test_a_reset_and_a_disabled_user_revoke_the_tokens_for_good(store: Store, anna: str, change: str) -> None:
    store.users.add("bert", "viewer", OTHER, "root")
    own, other = (store.tokens.make("nightly", user, "viewer").secret for user in (anna, "bert"))
    assert store.users.change_password(anna, GOOD, OTHER)
    assert store.tokens.person(own), "one's own change keeps them"
    if change == "reset":
        store.users.set_password(anna, GOOD, "root")
    else:
        store.users.disable(anna, "root")
        store.users.enable(anna, "root")
    assert store.tokens.person(own) is None
    assert store.tokens.all(anna) == []
    assert store.tokens.person(other)


@pytest.mark.parametrize("change", ["reset", "disable"])
def test_a_change_of_the_own_password_does_not_undo_what_an_admin_did_meanwhile(
    store: Store, anna: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    checked = store.users._checked

    def slowly(name: str, password: str) -> Any:
        found = checked(name, password)
        if change == "reset":
            store.users.set_password(anna, "a fox in the 9th field", "root")
        else:
            store.users.disable(anna, "root")
        return found

    monkeypatch.setattr(store.users, "_checked", slowly)
    assert store.users.change_password(anna, GOOD, OTHER) is None
    monkeypatch.undo()
    store.users.enable(anna, "root")
    assert store.users.log_in(anna, OTHER) is None
    assert store.users.log_in(anna, "a fox in the 9th field" if change == "reset" else GOOD)


def test_a_user_has_fifty_valid_tokens_and_old_ones_go_without_a_number_given_twice(
    store: Store, clock: VirtualClock, anna: str
) -> None:
    made = [store.tokens.make(f"t{number}", anna, "viewer", expires_s=100.0) for number in range(50)]
    with pytest.raises(Refused):
        store.tokens.make("one more", anna, "viewer")
    store.tokens.revoke(made[0].row.id, anna)
    made.append(store.tokens.make("one more", anna, "viewer", expires_s=100.0))
    clock.advance(31 * 24 * 3600.0)
    new = store.tokens.make("new", anna, "viewer")
    assert new.row.id > max(one.row.id for one in made)
    assert [row.id for row in store.tokens.all()] == [made[-1].row.id, new.row.id]


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"name": "a\nb"}, {"name": "x" * 64}, {"role": "owner"}, {"run_id": "toy-1", "role": "operator"},
     {"expires_s": 0.0}, {"expires_s": 1e9}],
)  # fmt: skip
def test_a_token_with_an_invalid_value_is_refused(store: Store, anna: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ThinwireError):
        store.tokens.make(**{"name": "nightly", "user": anna, "role": "viewer", **wrong})
    assert store.tokens.all() == []


def test_the_database_holds_neither_passwords_nor_tokens(store: Store, anna: str) -> None:
    secret, token = store.tokens.make("nightly", anna, "viewer").secret, session(store, anna)
    with store._database.reading() as connection:
        tables = ("users", "tokens", "sessions", "device_actions")
        held = str([connection.execute(text(f"SELECT * FROM {table}")).all() for table in tables])
    assert "argon2id" in held
    for plain in (GOOD, secret, secret[3:], token):
        assert plain not in held


def test_the_audit_log_has_the_actor_of_each_action_and_of_each_command(store: Store, clock: VirtualClock) -> None:
    store.users.add("anna", "operator", GOOD, "root")
    clock.advance(1.0)
    store.commands.add("stop-run", "toy-1", who="anna")
    clock.advance(1.0)
    store.users.set_role("anna", "viewer", "bert")
    total, rows = store.audit.rows()
    assert total == 3
    assert [(row.who, row.what, row.about, row.detail) for row in rows] == [
        ("bert", "change role", "", "anna, viewer"), ("anna", "stop-run", "toy-1", ""),
        ("root", "add user", "", "anna, operator"),
    ]  # fmt: skip
    assert store.audit.rows(1, 1) == (3, rows[1:2])


def test_the_audit_log_tells_what_a_command_changes_and_why_it_was_refused(store: Store) -> None:
    run_id = new_run(store)
    store.tag_run(run_id, ["paper"], ["old"], "anna")
    store.commands.add("extend-run", run_id, {"rounds": 2, "sets": {"local.lr": "0.1"}}, "anna")
    number = store.commands.add("extend-run", run_id, {"rounds": 1, "sets": {}}, "bert")
    store.commands.answer(number, {"done": False, "error": f"{run_id} is running", "why": "", "try": ""})
    store.commands.add("start-run", "", {"plan": {"run": {}}}, "anna")
    assert [(row.what, row.detail) for row in store.audit.rows()[1]] == [
        ("start-run", ""), ("extend-run", f"1 more round; refused: {run_id} is running"),
        ("extend-run", "2 more rounds, local.lr = 0.1"), ("tag-run", "+paper -old"),
    ]  # fmt: skip
