"""`aggregator users` and `tokens`: who may use the dashboard, from the machine itself."""

from __future__ import annotations

import getpass
import io
import sys
from pathlib import Path

import pytest

from thinwire.store import Store

GOOD, OTHER = "an owl in the 7th tower", "a mole under the 8th tree"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    """Lets a person type these passwords at a terminal."""

    def type_(*passwords: str) -> None:
        left = list(passwords)
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(getpass, "getpass", lambda *_: left.pop(0))

    return type_


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_user_is_added_with_a_password_that_is_typed_twice(thinwire, home: Path, store: Store, typed):
    typed(GOOD, GOOD)
    said = thinwire("aggregator", "users", "add", "anna", "--role", "admin", "--home", home)
    assert (said.code, said.out.strip()) == (0, "anna may log in, with the role admin")
    assert GOOD not in said.out + said.err
    assert store.users.log_in("anna", GOOD)
    typed(GOOD, OTHER)
    said = thinwire("aggregator", "users", "add", "bert", "--home", home)
    assert (said.code, "the two passwords differ" in said.err) == (2, True)
    assert [row.name for row in store.users.all()] == ["anna"]


def test_a_program_gives_the_password_on_stdin(thinwire, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    given(monkeypatch, f"{GOOD}\n")
    assert thinwire("aggregator", "users", "add", "anna", "--password-stdin", "--home", home).code == 0
    given(monkeypatch, f"{OTHER}\n")
    assert thinwire("aggregator", "users", "reset", "anna", "--password-stdin", "--home", home).code == 0
    assert [bool(store.users.log_in("anna", one)) for one in (GOOD, OTHER)] == [False, True]
    given(monkeypatch, "")
    said = thinwire("aggregator", "users", "reset", "anna", "--home", home)
    assert (said.code, "no terminal" in said.err, "--password-stdin" in said.err) == (2, True, True)


def test_a_first_user_is_added_before_the_aggregator_was_ever_started(
    thinwire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    given(monkeypatch, f"{GOOD}\n")
    fresh = tmp_path / "fresh"
    assert thinwire("aggregator", "users", "add", "anna", "--password-stdin", "--home", fresh).code == 0
    (row,) = thinwire("aggregator", "users", "list", "--json", "--home", fresh).document
    assert (row["name"], row["role"], row["disabled_at"]) == ("anna", "viewer", None)
    assert "password_hash" not in row


def test_a_disabled_user_is_out_until_enabled(thinwire, home: Path, store: Store):
    store.users.add("anna", "operator", GOOD, "root")
    session = store.users.log_in("anna", GOOD) or ""
    assert thinwire("aggregator", "users", "disable", "anna", "--home", home).code == 0
    assert not store.logins.valid(session)
    assert "disabled" in thinwire("aggregator", "users", "list", "--home", home).out
    assert thinwire("aggregator", "users", "enable", "anna", "--home", home).code == 0
    assert "operator" in thinwire("aggregator", "users", "list", "--home", home).out
    assert thinwire("aggregator", "users", "disable", "bert", "--home", home).code == 9


def test_the_sessions_by_code_end(thinwire, home: Path, store: Store):
    session = store.logins.redeem(store.logins.new_code()) or ""
    assert thinwire("aggregator", "users", "logout", "machine", "--home", home).code == 0
    assert not store.logins.valid(session)
    assert thinwire("aggregator", "users", "logout", "bert", "--home", home).code == 9


@pytest.mark.parametrize("wrong", [("Anna", "viewer"), ("anna", "owner"), ("machine", "viewer")])
def test_a_name_or_a_role_that_is_none_is_refused(
    thinwire, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, str]
):  # fmt: skip
    given(monkeypatch, f"{GOOD}\n")
    name, role = wrong
    said = thinwire("aggregator", "users", "add", name, "--role", role, "--password-stdin", "--home", home)
    assert (said.code, "try:" in said.err) == (2, True)
    assert store.users.all() == []


def test_a_user_who_cannot_be_added_is_refused_before_a_password_is_typed(thinwire, home: Path, store: Store):
    store.users.add("anna", "operator", GOOD, "root")
    for name, role, code in (("anna", "viewer", 5), ("bert", "owner", 2), ("Bert", "viewer", 2)):
        said = thinwire("aggregator", "users", "add", name, "--role", role, "--home", home)
        assert (said.code, "password" in said.err) == (code, False)
    said = thinwire("aggregator", "users", "add", "bert", "--role", "admin", "--home", home)
    assert f"users add --home {home} bert --role admin --password-stdin < FILE\n" in said.err


def test_a_token_is_printed_once_listed_and_revoked(thinwire, home: Path, store: Store):
    secret = thinwire("aggregator", "tokens", "add", "nightly", "--expires", "7d", "--home", home).out.strip()
    person = store.tokens.person(secret)
    assert person is not None
    assert (person.user, person.role, person.token) == ("machine", "viewer", 1)
    said = thinwire("aggregator", "tokens", "list", "--home", home).out
    assert "nightly" in said
    assert secret not in said
    assert thinwire("aggregator", "tokens", "revoke", "1", "--home", home).code == 0
    assert store.tokens.person(secret) is None
    assert thinwire("aggregator", "tokens", "list", "--json", "--home", home).document == []
    assert thinwire("aggregator", "tokens", "revoke", "1", "--home", home).code == 9


def test_a_token_of_a_user_may_do_no_more_than_the_user_and_of_a_run_reads_it(thinwire, home: Path, store: Store):
    store.users.add("anna", "viewer", GOOD, "root")
    refused = thinwire("aggregator", "tokens", "add", "x", "--user", "anna", "--role", "admin", "--home", home)
    assert (refused.code, "anna is viewer" in refused.err) == (5, True)
    assert thinwire("aggregator", "tokens", "add", "x", "--run", "none", "--home", home).code == 9
    said = thinwire("aggregator", "tokens", "add", "x", "--user", "anna", "--json", "--home", home)
    assert (said.document["user"], said.document["secret"][:3]) == ("anna", "tw_")
