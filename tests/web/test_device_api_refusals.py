"""Who may see the dashboard, and by which name it may be called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from thinwire.core.errors import UsageError
from thinwire.store import Store
from thinwire.web.security import STATIC
from thinwire.web.settings import listen_address

Visit = Callable[..., TestClient]
HIDDEN = [
    "/",
    "/runs/digits-1",
    "/devices",
    "/devices/pi-01",
    "/runs/digits-1/more",
    "/nothing",
    "/api",
    "/api/v1/openapi.json",
]
CSV = ["/api/v1/devices.csv", *(f"/api/v1/runs/digits-1/{name}.csv" for name in ("rounds", "updates", "clients"))]
OPEN = ["/healthz", "/login", "/static/app.js", "/static/vendor/preact.js", "/static/style.css"]


def routes(page: TestClient) -> list[tuple[str, str]]:
    """Every documented route with its method, its places filled in."""
    paths = page.get("/api/v1/openapi.json").json()["paths"]
    places = {
        "run_id": "digits-1", "number": "1", "name": "pi-01", "verb": "stop", "user": "anna", "change": "disable",
        "version": "1",
    }  # fmt: skip
    filled = [(method, path.format(**places)) for path, methods in paths.items() for method in methods]
    assert len(filled) >= 16
    return filled


def test_no_route_answers_without_a_session(page: TestClient, visit: Visit, told: Told):
    stranger = visit()
    for method, path in routes(page):
        answer = stranger.request(method, path)
        assert answer.status_code == 401, path
        assert answer.json()["try"]
    for path in [*HIDDEN, *CSV]:
        answer = stranger.get(path)
        assert answer.status_code == (401 if path.startswith("/api/") else 303), path
        assert told.run_id not in answer.text
    assert stranger.post("/logout").status_code == 401


def test_all_routes_answer_with_a_session(page: TestClient, told: Told):
    told.store.commands.add("revoke", args={"device": "pi-01"})
    for method, path in routes(page):
        if method == "get" and path != "/api/v1/live" and not path.endswith(("/stream", "/models/1")):  # it kept none
            query = "?runs=digits-1" if path == "/api/v1/compare" else ""
            assert page.get(path + query).status_code == 200, path
    for path in [*HIDDEN[:4], *CSV]:
        assert page.get(path).status_code == 200, path


def test_strangers_see_only_health_login_and_static_files(visit: Visit):
    stranger = visit()
    assert [stranger.get(path).status_code for path in OPEN] == [200] * len(OPEN)
    for path in ("/static/../settings.py", "/static/..%2f..%2fstore/store.py", "/healthz/", "/login/x", "/static"):
        assert stranger.get(path).status_code in (303, 404), path


def test_a_stranger_is_led_to_the_login_and_back(visit: Visit, store: Store):
    stranger = visit()
    assigned = stranger.get("/runs/digits-1")
    assert assigned.headers["location"] == "../login?next=runs/digits-1"
    answer = stranger.post("/login?next=runs/digits-1", data={"code": store.logins.new_code()})
    assert answer.headers["location"] == "runs/digits-1"
    for path, back in (("/devices", "login?next=devices"), ("/devices/pi-01", "../login?next=devices/pi-01")):
        assert visit().get(path).headers["location"] == back


@pytest.mark.parametrize("after", ["//evil.example", "https://evil.example", "../x", "runs/../../x", "javascript:1"])
def test_a_login_leads_nowhere_else(visit: Visit, store: Store, after: str):
    answer = visit().post("/login", params={"next": after}, data={"code": store.logins.new_code()})
    assert answer.headers["location"] == "./"


def test_a_code_opens_one_session_once(visit: Visit, store: Store):
    code, first, second = store.logins.new_code(), visit(), visit()
    cookie = first.post("/login", data={"code": code}).headers["set-cookie"]
    assert re.match(r"thinwire-8080=[\w-]{40,};", cookie)
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert second.post("/login", data={"code": code}).status_code == 401
    assert second.get("/").status_code == 303
    assert first.get(f"/login?code={code}").headers["location"] == "./"  # who is in already just goes on


def test_a_printed_link_logs_in_but_not_when_fetched_ahead(visit: Visit, store: Store):
    client, path = visit(), f"/login?code={store.logins.new_code()}"
    assert client.get(path, headers={"Sec-Purpose": "prefetch;prerender"}).status_code == 200
    assert client.get(path).status_code == 303
    assert client.get("/").status_code == 200


def test_a_session_ends_with_the_logout(page: TestClient):
    answer = page.post("/logout", headers={"Origin": "http://127.0.0.1:8080"})
    assert answer.status_code == 303
    assert page.get("/api/v1/runs").status_code == 401


def test_guessing_codes_never_burns_the_right_one(visit: Visit, store: Store):
    client = visit()
    assert {client.post("/login", data={"code": f"AAAA-{n}"}).status_code for n in range(11)} == {401}
    assert client.post("/login", data={"code": store.logins.new_code()}).status_code == 303


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_only_a_link_that_is_followed_may_come_from_another_page(page: TestClient, site: str):
    said = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert page.get("/login", headers=said).status_code == 200
    for other in ({"Sec-Fetch-Dest": "iframe"}, {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}):
        assert page.get("/login", headers=said | other).status_code == 403
        assert page.get("/api/v1/runs", headers=said | other).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "", "[::2]"])
def test_another_name_for_this_address_is_refused(page: TestClient, visit: Visit, host: str):
    for client, path in [(page, "/api/v1/runs"), (page, "/"), (visit(), "/login"), (visit(), "/healthz")]:
        assert client.get(path, headers={"Host": host}).status_code == 421, path


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:8080", "LOCALHOST:1"])
def test_the_loopback_has_several_names(page: TestClient, host: str):
    assert page.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "other", ["http://evil.example", "http://127.0.0.1:3000", "http://localhost:8080", "null", "http://["]
)
def test_other_pages_of_the_same_browser_are_refused(page: TestClient, told: Told, other: str):
    assert page.get("/api/v1/runs", headers={"Origin": other}).status_code == 403
    assert page.post(f"/api/v1/runs/{told.run_id}/stop", headers={"Origin": other}).status_code == 403
    assert page.post("/login", data={"code": "x"}, headers={"Origin": other}).status_code == 403
    cross = {"Sec-Fetch-Site": "same-site"}
    assert page.post(f"/api/v1/runs/{told.run_id}/stop", headers=cross).status_code == 403
    assert page.post(f"/api/v1/runs/{told.run_id}/stop").status_code == 403  # nothing says where it comes from
    assert not told.store.commands.pending()


def test_every_answer_forbids_inline_code_and_guessing_of_types(page: TestClient, visit: Visit, told: Told):
    stranger = visit()
    answers = [
        page.get(path) for path in ("/", "/api/v1/runs", "/api/v1/runs/none", "/login", "/static/app.js", "/static/no")
    ]
    answers += [stranger.get("/"), stranger.get("/api/v1/runs"), stranger.get("/", headers={"Host": "x"})]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == ("no-cache" if "/static/" in str(answer.url) else "no-store")
        assert not {"server", "access-control-allow-origin"} & set(answer.headers)


def test_html_holds_no_inline_code_and_only_relative_addresses():
    for name in ("page.html", "login.html", "problem.html"):
        text = (STATIC / name).read_text()
        assert not re.search(r"<style|\son\w+=|\sstyle=|<script>|<script(?![^>]*\ssrc=)", text)
        assert not re.findall(r'(?:src|href)="(?:/|https?:)', text)
    for file in [*STATIC.glob("*.js"), STATIC / "style.css"]:
        assert not re.search(r"https?://(?!www\.w3\.org)(?!\$\{)", file.read_text()), file.name


def test_large_requests_are_refused_unread(page: TestClient):
    assert page.post("/login", content=b"x" * 70_000).status_code == 413


@pytest.mark.parametrize("strange", [{"content": b"a=1&b=1&c=1&d=1&e=1&"}, {"headers": {"Content-Length": "9" * 5000}}])
def test_a_stranger_s_request_of_no_form_is_refused_and_raises_nothing(visit: Visit, strange: dict[str, Any]):
    assert visit().post("/login", **strange).status_code in (400, 413)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:80", "192.168.1.4:80", "example.org:80", "127.0.0.1", "127.0.0.1:x", ":80"]
)
def test_the_dashboard_listens_on_the_loopback_only(address: str):
    with pytest.raises(UsageError) as refused:
        listen_address(address)
    assert refused.value.hint
