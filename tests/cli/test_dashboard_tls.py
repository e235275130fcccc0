"""The dashboard beyond loopback: TLS with a leaf of its own, after there is an admin, and by known names only."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from thinwire.cli.aggregator.dashboard import Exposure
from thinwire.cli.aggregator.tls import Certificates
from thinwire.cli.params import Address
from thinwire.core.errors import Refused, UsageError
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.transport.protocol.certificates import chains, pin_of, server_name

COMMAND = [sys.executable, "-m", "thinwire.cli"]
GOOD = "an owl in the 7th tower"
ANYWHERE = Address("0.0.0.0", 0)


@pytest.fixture
def place(home: Path) -> AggregatorHome:
    return AggregatorHome.under(home)


def test_it_is_not_opened_to_others_before_an_admin_may_log_in(store: Store):
    Exposure(Address("127.0.0.1", 8080)).require_admin(store)
    store.users.add("anna", "viewer", GOOD, "root")
    with pytest.raises(Refused) as refused:
        Exposure(ANYWHERE).require_admin(store)
    assert "users add" in refused.value.hint
    store.users.set_role("anna", "admin", "root")
    Exposure(ANYWHERE).require_admin(store)


def test_a_proxy_is_named_by_its_address():
    Exposure(ANYWHERE, proxy="192.0.2.7").require_possible()
    with pytest.raises(UsageError):
        Exposure(ANYWHERE, proxy="proxy.example").require_possible()


def test_the_leaf_is_the_dashboard_s_own_and_has_no_name_that_devices_look_for(place: AggregatorHome):
    exposure = Exposure(ANYWHERE, ("fl.example.org",))
    reach = exposure.reach(place, Certificates())
    assert reach.certificate is not None
    assert reach.key is not None
    (chain,) = chains(place.tls)
    leaf = x509.load_pem_x509_certificate(reach.certificate.read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert "fl.example.org" in names
    assert server_name(chain.pin) not in names
    assert pin_of(leaf) != pin_of(x509.load_pem_x509_certificate(next(place.tls.glob("*.pem")).read_bytes()))
    assert reach.key.stat().st_mode & 0o777 == 0o600
    words = " ".join(reach.words())
    assert "--name fl.example.org" in words
    assert str(place.tls) not in words, "the dashboard is told nothing of the CA"
    before = reach.certificate.read_bytes()
    assert exposure.reach(place, Certificates()).certificate.read_bytes() == before  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="other\\.example"):
        Exposure(ANYWHERE, ("other.example",)).reach(place, Certificates())


def test_on_loopback_it_has_no_certificate(place: AggregatorHome):
    assert Exposure(Address("127.0.0.1", 8080), ("fl.example.org",)).reach(place, Certificates()).certificate is None
    assert not list(place.tls.iterdir())


@pytest.fixture
def opened(home: Path, place: AggregatorHome) -> Iterator[str]:
    """An aggregator whose dashboard listens on all addresses, with an admin; gives the dashboard's port."""
    with Store.open(place.database) as store:
        store.users.add("anna", "admin", GOOD, "root")
    words = ["aggregator", "start", "--listen", "127.0.0.1:0", "--dashboard", "0.0.0.0:0"]
    words += ["--dashboard-name", "fl.example.org", "--background", "--home", str(home)]
    subprocess.run([*COMMAND, *words], check=True, capture_output=True, timeout=120)
    yield str(home)
    subprocess.run([*COMMAND, "aggregator", "stop", "--home", str(home)], check=False, capture_output=True, timeout=60)


def test_a_user_logs_in_over_tls_that_the_aggregator_s_ca_vouches_for(
    thinwire, opened: str, place: AggregatorHome
):  # fmt: skip
    about = thinwire("aggregator", "status", "--login", "--json", "--home", opened).document
    port = about["dashboard"].rpartition(":")[2]
    assert about["login"].startswith(f"https://fl.example.org:{port}/login?code=")
    trust = ssl.create_default_context(cafile=str(next(place.tls.glob("*.ca.pem"))))
    base, host = f"https://localhost:{port}", {"Host": f"fl.example.org:{port}"}
    with httpx.Client(verify=trust, trust_env=False) as client:
        answer = client.post(f"{base}/login", data={"name": "anna", "password": GOOD}, headers=host)
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"__Host-thinwire-{port}=")
        assert "Secure" in cookie
        session = {**host, "Cookie": cookie.partition(";")[0]}
        assert client.get(f"{base}/api/v1/session", headers=session).json()["user"] == "anna"
        assert client.get(f"{base}/healthz", headers={"Host": "evil.example"}).status_code == 421
        plain = {"Origin": f"http://fl.example.org:{port}"}
        assert client.get(f"{base}/api/v1/session", headers=session | plain).status_code == 403
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)


def test_without_an_admin_the_aggregator_says_what_to_do(thinwire, home: Path):
    said = thinwire("aggregator", "start", "--listen", "127.0.0.1:0", "--dashboard", "0.0.0.0:0", "--home", home)
    assert (said.code, "there is no admin yet" in said.err, "users add" in said.err) == (5, True, True)
