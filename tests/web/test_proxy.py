"""Names, TLS and proxies: by which host the dashboard may be called, and whose forwarded headers count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from thinwire.core.errors import UsageError
from thinwire.store import Store
from thinwire.web.app import create_app
from thinwire.web.settings import Settings, listen_address

Behind = Callable[..., TestClient]
BY_PROXY = {"X-Forwarded-Host": "fl.example.org", "X-Forwarded-Proto": "https"}


@pytest.fixture
def behind(store: Store) -> Iterator[Behind]:
    """Makes clients whose connections come from an address."""
    clients: list[TestClient] = []

    def make(address: str = "192.0.2.7", **settings: Any) -> TestClient:
        app = create_app(replace(Settings(store.url, port=8443), **settings), store)
        clients.append(TestClient(app, "http://127.0.0.1:8443", follow_redirects=False, client=(address, 1)))
        return clients[-1].__enter__()

    yield make
    for client in clients:
        client.__exit__(None, None, None)


def test_forwarded_headers_count_from_the_proxy_and_from_nobody_else(behind: Behind, store: Store):
    names = ("fl.example.org",)
    proxy = behind(names=names, proxy="192.0.2.7")
    answer = proxy.post("/login", data={"code": store.logins.new_code()}, headers=BY_PROXY)
    assert "Secure" in answer.headers["set-cookie"]
    evil = {**BY_PROXY, "X-Forwarded-Host": "evil.example"}
    assert proxy.get("/healthz", headers=evil).status_code == 421
    for stranger in (behind("192.0.2.8", names=names, proxy="192.0.2.7"), behind(names=names)):
        answer = stranger.post("/login", data={"code": store.logins.new_code()}, headers=BY_PROXY)
        assert "Secure" not in answer.headers["set-cookie"]
        assert stranger.get("/healthz", headers=evil).status_code == 200, "the header of a stranger is not read"


def test_a_post_through_the_proxy_has_the_origin_that_the_browser_sees(behind: Behind, store: Store):
    client = behind(names=("fl.example.org",), proxy="192.0.2.7")
    client.post("/login", data={"code": store.logins.new_code()}, headers=BY_PROXY)
    cookie = {"Cookie": f"thinwire-8443={client.cookies['thinwire-8443']}"}
    for origin, status in (("https://fl.example.org", 303), ("https://evil.example", 403), ("http://127.0.0.1", 403)):
        said = client.post("/logout", headers={**BY_PROXY, **cookie, "Origin": origin})
        assert said.status_code == status or (status == 303 and said.status_code == 401), origin


def test_over_the_tls_of_a_proxy_no_page_without_tls_is_ours(behind: Behind, store: Store):
    client = behind(names=("fl.example.org",), proxy="192.0.2.7")
    code = {"code": "AAAA"}
    for proto, origin, status in (
        ("https", "http://fl.example.org", 403), ("https", "https://fl.example.org", 401),
        ("https,http", "http://fl.example.org", 403), ("http", "http://fl.example.org", 401),
    ):  # fmt: skip
        headers = {**BY_PROXY, "X-Forwarded-Proto": proto, "Origin": origin}
        assert client.post("/login", data=code, headers=headers).status_code == status, (proto, origin)


def test_behind_a_proxy_wrong_passwords_count_for_the_address_that_the_proxy_names(behind: Behind, store: Store):
    store.users.add("anna", "admin", "an owl in the 7th tower", "root")
    client = behind(names=("fl.example.org",), proxy="192.0.2.7")

    def said(address: str, password: str) -> int:
        headers = {**BY_PROXY, "X-Forwarded-For": address}
        given = {"name": "anna", "password": password}
        return int(client.post("/login", data=given, headers=headers).status_code)

    assert [said(f"198.51.100.{number}, 203.0.113.9", "wrong") for number in range(6)] == [401] * 5 + [429]
    assert said("203.0.113.8", "an owl in the 7th tower") == 303


@pytest.mark.parametrize("address", ["192.0.2.7", "::ffff:192.0.2.7"])
def test_a_proxy_that_adds_a_line_is_believed_and_the_line_before_it_is_not(behind: Behind, address: str):
    """HAProxy's `option forwardfor` adds a line of its own to what a stranger sent."""
    client = behind(address, names=("fl.example.org",), proxy="192.0.2.7")

    def said(number: int, hosts: tuple[str, str]) -> int:
        lines = [("X-Forwarded-Host", host) for host in hosts] + [("X-Forwarded-Proto", "https")]
        lines += [("X-Forwarded-For", address) for address in (f"198.51.100.{number}", "203.0.113.9")]
        return int(client.post("/login", data={"name": "anna", "password": "wrong"}, headers=lines).status_code)

    named = ("evil.example", "fl.example.org")
    assert [said(number, named) for number in range(6)] == [401] * 5 + [429]
    assert said(7, named[::-1]) == 421


@pytest.mark.parametrize("path", ["/devices/", "/api/v1/runs/"])
def test_no_address_with_another_end_redirects_to_one_without_the_prefix_of_a_proxy(
    behind: Behind, store: Store, path: str
):
    client = behind()
    assert client.post("/login", data={"code": store.logins.new_code()}).status_code == 303
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8443", 200), ("localhost", 200), ("[::1]:8443", 200), ("[::1]", 200), ("evil.com@127.0.0.1", 421),
     ("127.0.0.1/evil", 421), ("127.0.0.1:8080:9", 421), ("127.0.0.1?x", 421), ("127.0.0.1#x", 421), ("[::1]x", 421),
     ("127.0.0.1:", 421), ("::1", 421), ("", 421)],
)  # fmt: skip
def test_a_host_is_a_name_with_one_port_and_nothing_else(behind: Behind, host: str, status: int):
    assert behind().get("/healthz", headers={"Host": host}).status_code == status


def test_it_may_be_called_by_its_names_only(behind: Behind):
    client = behind(names=("fl.example.org",), tls=True)
    for host, status in (
        ("fl.example.org:8443", 200),
        ("FL.example.org", 200),
        ("example.org", 421),
        ("a.fl.example.org", 421),
    ):
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


def test_over_tls_the_cookie_never_travels_without(behind: Behind, store: Store):
    cookie = behind(tls=True).post("/login", data={"code": store.logins.new_code()}).headers["set-cookie"]
    assert cookie.startswith("__Host-thinwire-8443=")
    assert {"Secure", "HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))


def test_it_listens_beyond_loopback_with_tls_only():
    assert listen_address("0.0.0.0:8443", tls=True) == ("0.0.0.0", 8443)
    with pytest.raises(UsageError):
        listen_address("0.0.0.0:8443")
