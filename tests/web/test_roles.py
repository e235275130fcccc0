"""Every route for every kind of visitor: what the table of least roles says is what the dashboard answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import update

from tests.support.api_answers import Told
from thinwire.store import MACHINE, ROLES, Condition, Store
from thinwire.store.sessions import Session, Token, hashed, open_session
from thinwire.web.access import ANYONE, LEAST, RECENT_S, Least
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

with warnings.catch_warnings():  # it says that it would rather have httpx2
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

HOST = "http://127.0.0.1:8080"
OURS = {"Origin": HOST}
OF_THE_ROUTE = ("this password is wrong", "this code is not valid", "this is not your present password")
PLACES = {
    "name": "pi-01",
    "number": "1",
    "verb": "stop",
    "user": "anna",
    "change": "disable",
    "path": "icon.svg",
    "version": "1",
}


@dataclass
class Visitors:
    """Makes the headers of visitors of a dashboard, whose streams end at once."""

    store: Store
    client: TestClient

    def session(self, role: str, *, user: str = "anna", ago_s: float = 0.0, expired: bool = False) -> dict[str, str]:
        """The headers of a session; the password was given `ago_s` seconds ago."""
        with self.store._database.writing() as connection:
            now = self.store._clock.wall()
            token = open_session(connection, user, role, now)
            values = {"confirmed_at": now - ago_s} | ({"expires_at": now} if expired else {})
            connection.execute(update(Session).where(Session.c.token_hash == hashed(token)), values)
        return {"Cookie": f"thinwire-8080={token}", **OURS}

    def token(self, role: str, run_id: str = "", **changed: float) -> dict[str, str]:
        """The headers of a program with a token; it sends no Origin."""
        made = self.store.tokens.make("a program", MACHINE, role, run_id)
        if changed:
            with self.store._database.writing() as connection:
                connection.execute(update(Token).where(Token.c.id == made.row.id), changed)
        return {"Authorization": f"Bearer {made.secret}"}

    def send(self, row: str, headers: Mapping[str, str], run_id: str = "digits-1") -> Any:
        method, path = row.split(" ", 1)
        body: dict[str, Any] = {"json": {}} if method == "POST" else {}
        return self.client.request(
            method, path.replace(":path", "").format(**PLACES, run_id=run_id), headers=dict(headers), **body
        )  # fmt: skip


@pytest.fixture
def visitors(store: Store, told: Told) -> Iterator[Visitors]:
    app = create_app(Settings(store.url, port=8080), store, closing=lambda: True)
    with TestClient(app, base_url=HOST, follow_redirects=False) as client:
        yield Visitors(told.store, client)


TABLE = {row: need if isinstance(need, Least) else Least(need) for row, need in LEAST.items()}


def is_api(row: str) -> bool:
    return row.split(" ", 1)[1].startswith("/api/")


def refused_as_stranger(row: str) -> set[int]:
    if TABLE[row].role == ANYONE:
        return set()
    return {401} if is_api(row) or not row.startswith("GET") else {303}


def check(answer: Any, expected: set[int], row: str) -> None:
    """`expected` is empty if the guard lets the request pass: then anything but its refusals may come."""
    login = row in ("GET /login", "POST /login", "POST /logout")  # they answer 401 and 303 by themselves
    if expected:
        assert answer.status_code in expected, (row, answer.text[:200])
        if is_api(row):
            said = answer.json()
            assert said["detail"] and said["why"] and said["try"], row
    elif not login:
        assert answer.status_code not in (401, 303), (row, answer.text[:200])
        assert answer.status_code != 403 or answer.json()["detail"] in OF_THE_ROUTE, (row, answer.text)


@pytest.mark.parametrize("kind", ["nobody", "an expired session", "an unknown session"])
def test_no_route_but_the_open_ones_answers_a_stranger(visitors: Visitors, kind: str):
    headers = {
        "nobody": OURS,
        "an expired session": visitors.session("admin", expired=True),
        "an unknown session": {"Cookie": "thinwire-8080=none", **OURS},
    }[kind]
    for row in TABLE:
        check(visitors.send(row, headers), refused_as_stranger(row), row)


@pytest.mark.parametrize("role", ROLES)
def test_a_user_may_send_what_the_role_allows_and_nothing_else(visitors: Visitors, role: str):
    for row, need in TABLE.items():
        allowed = need.role == ANYONE or ROLES.index(role) >= ROLES.index(need.role)
        answer = visitors.send(row, visitors.session(role))
        check(answer, set() if allowed else {403}, row)


@pytest.mark.parametrize(("user", "what"), [("anna", "password"), (MACHINE, "code")])
def test_some_routes_ask_an_admin_for_the_password_again(visitors: Visitors, user: str, what: str):
    again = {row for row, need in TABLE.items() if need.recent}
    assert {row.split("/api/v1/")[1].split("/")[0] for row in again} == {"users", "tokens", "devices", "runs"}
    for row in again:
        answer = visitors.send(row, visitors.session("admin", user=user, ago_s=RECENT_S + 1))
        assert (answer.status_code, answer.json()["confirm"]) == (403, what), row
        assert visitors.send(row, visitors.session("admin", user=user, ago_s=RECENT_S - 60)).status_code != 403, row


@pytest.mark.parametrize("role", ROLES)
def test_a_token_may_do_what_its_role_allows_on_the_api_and_makes_no_others(visitors: Visitors, role: str):
    headers = visitors.token(role)
    for row, need in TABLE.items():
        if not is_api(row):
            check(visitors.send(row, headers), refused_as_stranger(row), row)
            continue
        allowed = not need.session and ROLES.index(role) >= ROLES.index(need.role)
        check(visitors.send(row, headers), set() if allowed else {403}, row)
    for row in ("POST /api/v1/users", "POST /api/v1/users/{user}/{change}", "POST /api/v1/tokens"):
        assert TABLE[row].session, row


@pytest.mark.parametrize("run_id", ["digits-1", "digits-2", "latest", "digits-"])
def test_a_token_of_a_run_reads_that_run_only(visitors: Visitors, run_id: str):
    headers = visitors.token("viewer", "digits-1")
    for row in filter(is_api, TABLE):
        reads = row.startswith("GET") and "{run_id}" in row and TABLE[row].role == "viewer"
        allowed = reads and run_id == "digits-1"
        check(visitors.send(row, headers, run_id), set() if allowed else {403}, row)


@pytest.mark.parametrize("kind", ["expired", "revoked", "unknown", "empty"])
def test_a_token_that_is_no_longer_valid_opens_nothing(visitors: Visitors, kind: str):
    headers = {
        "expired": visitors.token("admin", expires_at=1.0), "revoked": visitors.token("admin", revoked_at=1.0),
        "unknown": {"Authorization": "Bearer tw_" + "x" * 43}, "empty": {"Authorization": "bearer"},
    }[kind]  # fmt: skip
    for row in filter(is_api, TABLE):
        answer = visitors.send(row, headers)
        check(answer, {401}, row)
        assert answer.headers["www-authenticate"] == "Bearer"
        with_session = headers | visitors.session("admin")
        assert visitors.send(row, with_session).status_code == 401, "a session does not stand in for a token"


def test_a_program_s_request_needs_no_origin_and_a_browser_s_does(visitors: Visitors):
    stop, headers = "POST /api/v1/runs/{run_id}/{verb}", visitors.session("operator")
    assert visitors.send(stop, visitors.token("operator")).status_code == 202
    assert visitors.send(stop, {"Cookie": headers["Cookie"]}).status_code == 403
    assert visitors.send(stop, headers | {"Origin": "http://evil.example"}).status_code == 403
    assert visitors.send("GET /api/v1/runs", visitors.token("viewer") | {"Host": "evil.example"}).status_code == 421
    assert [command.who for command in visitors.store.commands.pending()] == [f"{MACHINE}, token 1"]


def test_a_disabled_user_is_out_at_once_with_all_sessions_and_tokens(visitors: Visitors):
    visitors.store.users.add("anna", "operator", "an owl in the 7th tower", "root")
    session = visitors.session("operator")
    token = {"Authorization": f"Bearer {visitors.store.tokens.make('nightly', 'anna', 'viewer').secret}"}
    runs = "GET /api/v1/runs"
    assert [visitors.send(runs, headers).status_code for headers in (session, token)] == [200, 200]
    assert (
        visitors.send("POST /api/v1/users/{user}/{change}", visitors.session("admin", user="bert")).status_code == 200
    )
    assert [visitors.send(runs, headers).status_code for headers in (session, token)] == [401, 401]


@pytest.mark.parametrize(("role", "shown"), [("viewer", "an operator sees why"), ("operator", "to a@example.org")])
def test_why_a_message_was_not_sent_is_for_operators(visitors: Visitors, role: str, shown: str):
    alerts = visitors.store.alerts
    alerts.update([Condition("disk", "", "the disk has 3 MB free")])
    (row,) = alerts.open()
    alerts.not_sent(row, "to a@example.org")
    (one,) = visitors.send("GET /api/v1/alerts", visitors.session(role)).json()
    assert (one["failures"], one["failure"]) == (1, shown)
    assert shown in visitors.send("GET /api/v1/alerts.csv", visitors.session(role)).text
