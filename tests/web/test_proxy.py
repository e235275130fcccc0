"""Names, TLS and proxies: by which host the dashboard may be called, and whose forwarded headers count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

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

    def make(address: str = "192.0.2.7", **settings: object) -> TestClient:
        wanted = replace(Settings(store.url, port=8443), **settings)  # type: ignore[arg-type]
        app = create_app(wanted, store)
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
