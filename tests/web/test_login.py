"""Logging in: by name and password, by code, how often, and with which session."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from thinwire.store import MACHINE, Store
from thinwire.web.access import RECENT_S
from thinwire.web.login import WAITING, WRONG_FROM_ONE, WRONG_OF_NAME, WRONG_OF_ONE, PasswordChecks, TooMany

Visit = Callable[..., TestClient]
HOST = "http://127.0.0.1:8080"
OURS = {"Origin": HOST}
GOOD, OTHER = "an owl in the 7th tower", "a mole under the 8th tree"


@pytest.fixture
def anna(store: Store) -> dict[str, str]:
    store.users.add("anna", "admin", GOOD, "root")
    return {"name": "anna", "password": GOOD}


@pytest.fixture
def as_anna(visit: Visit, anna: dict[str, str]) -> TestClient:
    client = visit()
    assert client.post("/login", data=anna).status_code == 303
    client.headers["Origin"] = HOST
    return client


def age(store: Store, seconds: float) -> None:
    """Let the passwords of all sessions have been given so many seconds ago."""
    with store._database.writing() as connection:
        connection.exec_driver_sql(f"UPDATE sessions SET confirmed_at = confirmed_at - {seconds}")


def test_a_user_logs_in_by_name_and_password_and_is_named_on_the_page(visit: Visit, anna: dict[str, str]):
    client = visit()
    answer = client.post("/login?next=users", data={"name": " Anna ", "password": GOOD})
    assert (answer.status_code, answer.headers["location"]) == (303, "users")
    assert 'data-user="anna" data-role="admin"' in client.get("/").text
    said = client.get("/api/v1/session").json()
    assert (said["user"], said["role"], said["confirm"]) == ("anna", "admin", "password")


def test_a_wrong_name_and_a_wrong_password_are_told_alike(visit: Visit, store: Store, anna: dict[str, str]):
    store.users.add("bert", "viewer", GOOD, "root")
    store.users.disable("bert", "root")
    wrong = [("anna", OTHER), ("nobody", OTHER), ("bert", GOOD), ("anna", "")]
    answers = [visit().post("/login", data={"name": name, "password": password}) for name, password in wrong]
    assert {answer.status_code for answer in answers} == {401}
    assert len({re.sub(r'value="\w*"', "", answer.text) for answer in answers}) == 1
    assert not any("set-cookie" in answer.headers for answer in answers)


def test_each_login_has_a_new_session_and_ends_the_one_that_the_browser_brought(
    visit: Visit, store: Store, anna: dict[str, str]
):
    client = visit()
    client.cookies.set("thinwire-8080", "chosen-by-an-attacker")
    seen = {"chosen-by-an-attacker"}
    for login in (anna, {"code": store.logins.new_code()}, anna):
        before = client.cookies.get("thinwire-8080")
        token = client.post("/login", data=login).cookies["thinwire-8080"]
        assert token not in seen
        assert store.logins.valid(token)
        assert not store.logins.valid(before or "")
        client.cookies.clear()
        client.cookies.set("thinwire-8080", token)
        seen.add(token)


@pytest.mark.parametrize("other", ["theme", "a b=c", "=", "caf\u00e9=1", 'x="', ";;", "a=b\x01"])
def test_a_cookie_of_another_program_on_this_host_locks_nobody_out(page: TestClient, other: str):
    ours = f"thinwire-8080={page.cookies['thinwire-8080']}"
    page.cookies.clear()
    for cookie in (f"{other}; {ours}", f"{ours}; {other}"):
        headers = {"Cookie": cookie.encode("latin-1")}
        assert page.get("/api/v1/session", headers=headers).status_code == 200, cookie


def test_a_link_with_a_code_makes_another_user_s_browser_the_machine(as_anna: TestClient, store: Store):
    code = store.logins.new_code()
    assert as_anna.get(f"/login?code={code}").status_code == 303
    assert as_anna.get("/api/v1/session").json()["user"] == MACHINE


def test_a_link_uses_its_code_up_also_in_a_browser_that_has_a_session_by_code(
    page: TestClient, visit: Visit, store: Store
):
    before, code = page.cookies["thinwire-8080"], store.logins.new_code()
    assert page.get(f"/login?code={code}").status_code == 303
    assert page.cookies["thinwire-8080"] != before
    assert store.logins.redeem(code) is None
    assert page.get(f"/login?code={code}").status_code == 303, "opened again, it goes on with its session"
    assert visit().get(f"/login?code={code}").status_code == 401


def test_who_has_to_wait_gets_the_command_for_a_code_with_its_state_directory(
    visit: Visit, anna: dict[str, str], tmp_path: Path
):
    client, wrong = visit(lock=tmp_path / "aggregator" / "lock"), {**anna, "password": OTHER}
    command = f"thinwire aggregator status --home {tmp_path} --login"
    assert client.post("/login", data=anna).status_code == 303
    for _ in range(WRONG_OF_ONE + 1):
        told = client.post("/api/v1/session/confirm", json={"password": OTHER}, headers=OURS)
        page = client.post("/login", data=wrong)
    assert told.status_code == page.status_code == 429
    assert told.json()["try"].endswith(command)
    assert f"{command}.</p>" in page.text


def test_what_is_typed_as_a_name_comes_back_as_text(visit: Visit):
    answer = visit().post("/login", data={"name": '"><script>alert(1)</script>', "password": "x"})
    assert "<script>alert" not in answer.text
    assert "&lt;script&gt;alert(1)" in answer.text


def test_a_name_has_few_wrong_passwords_and_the_code_works_meanwhile(visit: Visit, store: Store, anna: dict[str, str]):
    client = visit()
    for name in ("anna", "nobody"):
        wrong = {"name": name, "password": OTHER}
        said = [client.post("/login", data=wrong).status_code for _ in range(WRONG_OF_ONE + 1)]
        assert said == [401] * WRONG_OF_ONE + [429]
    assert client.post("/login", data=anna).status_code == 429
    assert client.post("/login", data={"code": store.logins.new_code()}).status_code == 303


def nothing() -> str | None:
    """A check that finds no user."""
    return None


def test_wrong_passwords_are_limited_by_name_and_address_until_their_window_is_over():
    async def tried() -> None:
        now = [0.0]
        checks = PasswordChecks(lambda: now[0])

        async def right(name: str, address: str) -> bool:
            try:
                return await checks.of_login(name, address, lambda: "right") == "right"
            except TooMany:
                return False

        for _ in range(100):
            assert await right("anna", "192.0.2.1")
        for _ in range(WRONG_OF_ONE):
            assert await checks.of_login("anna", "192.0.2.1", nothing) is None
        assert not await right("anna", "192.0.2.1")
        assert await right("anna", "192.0.2.2"), "a stranger elsewhere keeps nobody out"
        assert await right("bert", "192.0.2.1")
        for number in range(WRONG_FROM_ONE - WRONG_OF_ONE):
            assert await checks.of_login(f"user-{number}", "192.0.2.1", nothing) is None
        assert not await right("bert", "192.0.2.1")
        assert await right("bert", "192.0.2.2")
        for number in range(WRONG_OF_NAME - WRONG_OF_ONE):
            assert await checks.of_login("anna", f"2001:db8:{number:x}::1", nothing) is None
        assert not await right("anna", "192.0.2.2")
        now[0] = 301.0
        assert await right("anna", "192.0.2.1")
        assert {name for name, _ in checks._tried} <= {"anna", ""}

    asyncio.run(tried())


def test_a_session_confirms_its_password_whatever_strangers_guess(as_anna: TestClient, visit: Visit):
    stranger = visit()
    for name in ["anna"] * WRONG_OF_ONE + [f"user-{number}" for number in range(3)]:
        assert stranger.post("/login", data={"name": name, "password": OTHER}).status_code == 401
    assert stranger.post("/login", data={"name": "anna", "password": GOOD}).status_code == 429
    assert as_anna.post("/api/v1/session/confirm", json={"password": GOOD}).status_code == 200
    for _ in range(WRONG_OF_ONE):
        assert as_anna.post("/api/v1/session/confirm", json={"password": OTHER}).status_code == 403
    assert as_anna.post("/api/v1/session/confirm", json={"password": GOOD}).status_code == 429


def test_a_new_password_that_is_too_short_is_no_wrong_password(as_anna: TestClient):
    for _ in range(WRONG_OF_ONE + 1):
        assert as_anna.post("/api/v1/session/password", json={"old": GOOD, "new": "short"}).status_code == 422
    assert as_anna.post("/api/v1/session/password", json={"old": GOOD, "new": OTHER}).status_code == 200


def test_logins_by_code_and_refused_ones_are_in_the_audit_log_which_no_guessing_fills(
    page: TestClient, visit: Visit, anna: dict[str, str]
):
    stranger = visit()
    for name in ("anna", "anna", "my secret password", "nobody"):
        assert stranger.post("/login", data={"name": name, "password": OTHER}).status_code == 401
    stranger.post("/login", data={"code": "AAAA"})
    rows = page.get("/api/v1/audit").json()["rows"]
    assert sorted((row["who"], row["what"], row["detail"]) for row in rows) == [
        ("dashboard", "refuse login", "a name of no user"),
        ("dashboard", "refuse login", "anna"),
        ("dashboard", "refuse login", "machine"),
        ("machine", "log in", "by a code"),
        ("root", "add user", "anna, admin"),
    ]


@pytest.mark.parametrize(
    ("path", "wrong"), [("confirm", {"password": OTHER}), ("password", {"old": OTHER, "new": OTHER})]
)
def test_a_wrong_password_in_a_session_is_in_the_audit_log(
    as_anna: TestClient, store: Store, path: str, wrong: dict[str, str]
):
    assert as_anna.post(f"/api/v1/session/{path}", json=wrong).status_code == 403
    assert [(row.who, row.detail) for row in store.audit.rows()[1] if row.what == "refuse login"] == [
        ("dashboard", "anna")
    ]


def test_an_admin_ends_the_sessions_by_code(as_anna: TestClient, page: TestClient):
    assert as_anna.post("/api/v1/users/machine/logout", json={}).status_code == 200
    assert page.get("/api/v1/session").status_code == 401
    assert as_anna.get("/api/v1/session").status_code == 200


def test_a_token_that_a_session_by_code_makes_lives_thirty_days_at_most(page: TestClient):
    page.headers["Origin"] = HOST
    assert page.post("/api/v1/tokens", json={"name": "long", "days": 31}).status_code == 422
    assert page.post("/api/v1/tokens", json={"name": "month", "days": 30}).status_code == 201


def test_many_checks_at_once_run_two_at_a_time_and_gain_no_further_guesses():
    async def tried() -> None:
        running, most = [0], [0]

        def work() -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            event.wait(0.01)
            running[0] -= 1

        import threading

        event = threading.Event()
        checks = PasswordChecks()
        found = await asyncio.gather(*(checks.of_login("anna", "::1", work) for _ in range(50)), return_exceptions=True)
        assert sum(one is None for one in found) == WRONG_OF_ONE
        assert most[0] <= 2
        others = (checks.of_login(f"user-{n}", "::1", work) for n in range(40))
        found = await asyncio.gather(*others, return_exceptions=True)
        assert sum(isinstance(one, TooMany) for one in found) >= 40 - WAITING - 4
        assert most[0] <= 2

    asyncio.run(tried())


def test_a_password_that_was_given_again_opens_what_needs_it(as_anna: TestClient, store: Store):
    made = {"name": "nightly", "role": "viewer"}
    age(store, RECENT_S + 1)
    refused = as_anna.post("/api/v1/tokens", json=made)
    assert (refused.status_code, refused.json()["confirm"]) == (403, "password")
    assert as_anna.post("/api/v1/session/confirm", json={"password": OTHER}).status_code == 403
    assert as_anna.post("/api/v1/session/confirm", json={"code": store.logins.new_code()}).status_code == 403
    assert as_anna.post("/api/v1/session/confirm", json={"password": GOOD}).status_code == 200
    assert as_anna.post("/api/v1/tokens", json=made).status_code == 201


def test_a_session_by_code_needs_a_fresh_code(page: TestClient, store: Store):
    page.headers["Origin"] = HOST
    age(store, RECENT_S + 1)
    user = {"name": "anna", "role": "viewer", "password": GOOD}
    assert page.post("/api/v1/users", json=user).json()["confirm"] == "code"
    assert page.post("/api/v1/session/confirm", json={"code": "AAAA"}).status_code == 403
    assert page.post("/api/v1/session/confirm", json={"code": store.logins.new_code()}).status_code == 200
    assert page.post("/api/v1/users", json=user).status_code == 201
    assert page.post("/api/v1/session/password", json={"old": "x", "new": GOOD}).status_code == 409


def test_who_changes_the_own_password_stays_logged_in_here_and_nowhere_else(
    as_anna: TestClient, visit: Visit, anna: dict[str, str]
):
    elsewhere, before = visit(), as_anna.cookies["thinwire-8080"]
    elsewhere.post("/login", data=anna)
    for wrong in ({"old": OTHER, "new": OTHER}, {"old": GOOD, "new": "short"}):
        assert as_anna.post("/api/v1/session/password", json=wrong).status_code in (403, 422)
    assert as_anna.post("/api/v1/session/password", json={"old": GOOD, "new": OTHER}).status_code == 200
    assert as_anna.cookies["thinwire-8080"] != before
    assert [client.get("/api/v1/session").status_code for client in (as_anna, elsewhere)] == [200, 401]
    assert visit().post("/login", data=anna).status_code == 401


def test_users_are_added_changed_and_listed_by_an_admin(as_anna: TestClient, visit: Visit, store: Store):
    def post(path: str, **body: Any) -> int:
        return int(as_anna.post(f"/api/v1/users{path}", json=body).status_code)

    assert post("", name="bert", role="viewer", password=OTHER) == 201
    assert post("", name="bert", role="viewer", password=OTHER) == 409
    assert post("", name="<b>", role="viewer", password=OTHER) == 422
    assert post("", name="carl", role="owner", password=OTHER) == 422
    assert post("/bert/role", role="operator") == 200
    assert [(row["name"], row["role"], row["who"]) for row in as_anna.get("/api/v1/users").json()] == [
        ("anna", "admin", "root"), ("bert", "operator", "anna"),
    ]  # fmt: skip
    assert post("/bert/reset", password=GOOD) == 200
    assert visit().post("/login", data={"name": "bert", "password": GOOD}).status_code == 303
    assert post("/bert/disable") == 200
    assert visit().post("/login", data={"name": "bert", "password": GOOD}).status_code == 401
    assert post("/bert/enable") == 200
    assert [post("/anna/disable"), post("/nobody/disable"), post("/bert/role"), post("/bert/burn")] == [
        409,
        404,
        422,
        422,
    ]
    assert "password" not in str(as_anna.get("/api/v1/users").json()).replace("password_at", "")


def test_a_user_sees_and_revokes_the_own_tokens_and_an_admin_those_of_all(
    as_anna: TestClient, visit: Visit, store: Store
):
    store.users.add("bert", "viewer", OTHER, "root")
    bert = visit()
    bert.post("/login", data={"name": "bert", "password": OTHER})
    bert.headers["Origin"] = HOST
    made = as_anna.post("/api/v1/tokens", json={"name": "mine", "role": "admin"}).json()
    assert bert.post("/api/v1/tokens", json={"name": "more", "role": "admin"}).status_code == 409
    assert bert.post("/api/v1/tokens", json={"name": "of a run", "run_id": "none"}).status_code == 404
    assert bert.post("/api/v1/tokens", json={"name": "his", "days": 1}).status_code == 201
    assert [[row["name"] for row in client.get("/api/v1/tokens").json()] for client in (bert, as_anna)] == [
        ["his"], ["mine", "his"],
    ]  # fmt: skip
    assert bert.post(f"/api/v1/tokens/{made['token']['id']}/revoke").status_code == 404
    program = visit()
    program.headers["Authorization"] = f"Bearer {made['secret']}"
    assert program.get("/api/v1/session").json() | {"confirmed_until": 0} == {
        "user": "anna", "role": "admin", "confirm": None, "confirmed_until": 0, "run_id": "",
    }  # fmt: skip
    assert as_anna.post(f"/api/v1/tokens/{made['token']['id']}/revoke").status_code == 200
    assert program.get("/api/v1/runs").status_code == 401
    assert made["secret"] not in as_anna.get("/api/v1/tokens").text + as_anna.get("/api/v1/audit").text


def test_the_audit_log_names_who_did_it_in_pages_and_as_a_file(as_anna: TestClient, store: Store):
    as_anna.post("/api/v1/users", json={"name": "bert", "role": "viewer", "password": OTHER})
    found = as_anna.get("/api/v1/audit?count=2").json()
    assert found["total"] == 3
    assert [(row["who"], row["what"], row["detail"]) for row in found["rows"]] == [
        ("anna", "add user", "bert, viewer"), ("anna", "log in", ""),
    ]  # fmt: skip
    assert as_anna.get("/api/v1/audit?first=2").json()["rows"][0]["who"] == "root"
    assert "add user" in as_anna.get("/api/v1/audit.csv").text
