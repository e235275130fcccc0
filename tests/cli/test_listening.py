"""`thinwire aggregator start` with addresses and certificates that cannot be: refused before anything is made."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime

import pytest

from tests.support.cli_story import told
from thinwire.cli.aggregator.tls import Certificates
from thinwire.cli.params import Address
from thinwire.core.errors import UsageError
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.store import Store
from thinwire.transport.protocol.certificates import make_ca, make_leaf


def start(thinwire, home, *words: str):
    return thinwire("aggregator", "start", "--home", home, *words)


@pytest.mark.parametrize(("text", "port"), [("127.0.0.1:0", 0), ("127.0.0.1:65535", 65_535), ("[::1]:9090", 9090)])
def test_an_address_has_a_port_up_to_65535(text, port):
    assert Address.parse(text, "--listen").port == port


@pytest.mark.parametrize("text", ["127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1", ":9090", "127.0.0.1:x"])
def test_another_port_is_refused(text):
    with pytest.raises(UsageError, match="--listen"):
        Address.parse(text, "--listen")


def test_an_address_that_is_not_of_this_machine_is_4_and_makes_no_ca(thinwire, home):
    for host in ("192.0.2.77", "nosuch.invalid"):
        said = start(thinwire, home, "--listen", f"{host}:19090", "--no-dashboard")
        assert (said.code, f"cannot listen on {host}:19090" in said.err) == (4, True)
        assert "--listen 0.0.0.0:19090" in said.err
    assert not (home / "aggregator" / "tls" / "state.json").exists()


def test_a_port_that_is_taken_is_4_and_the_next_one_is_named(thinwire, home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = start(thinwire, home, "--listen", f"127.0.0.1:{port}", "--no-dashboard")
    assert (said.code, "taken by another process" in said.err) == (4, True)


@pytest.mark.parametrize("listen", ["127.0.0.1:18080", "0.0.0.0:18080"])
def test_device_api_and_page_on_one_port_are_2(thinwire, home, listen):
    said = start(thinwire, home, "--listen", listen, "--dashboard", "127.0.0.1:18080")
    assert (said.code, "both say port 18080" in said.err) == (2, True)


def test_a_new_address_of_the_host_needs_no_new_ca(tmp_path):
    first = Certificates().authority(tmp_path, Address("0.0.0.0", 9090))
    later = Certificates().authority(tmp_path, Address("198.51.100.7", 9090))
    assert first is not None
    assert later is not None
    assert later.pin == first.pin
    with pytest.raises(UsageError, match="made for other names"):
        Certificates(names=("agg.example",)).authority(tmp_path, Address("198.51.100.7", 9090))


def test_invitations_name_what_ones_own_certificate_is_for(tmp_path):
    ca = make_ca(["agg.example", "192.0.2.9"], datetime.now(UTC))
    leaf = make_leaf(ca, ["agg.example", "192.0.2.9"], datetime.now(UTC))
    (tmp_path / "cert").write_bytes(leaf.certificate)
    own = Certificates(certificate=tmp_path / "cert", key=tmp_path / "key")
    assert {"agg.example", "192.0.2.9"} <= set(own.reached())
    assert not {"localhost", "127.0.0.1"} & set(own.reached())
    named = Certificates(names=("192.0.2.9",), certificate=tmp_path / "cert", key=tmp_path / "key")
    assert named.reached() == ("192.0.2.9",)
    with pytest.raises(UsageError, match="is for other names"):
        Certificates(names=("other.example",), certificate=tmp_path / "cert", key=tmp_path / "key").reached()


def test_who_waits_is_in_the_status_and_nobody_is_online_without_an_aggregator(thinwire, home):
    place = AggregatorHome.under(home)
    with Store.open(place.database) as store:
        store.roster.enrol("pi-01", "ab" * 32, b"key", "loopback")
    about = {"listen": "0.0.0.0:9090", "urls": ["https://agg.example:9090"], "pin": "cd" * 32, "dashboard": None}
    with hold(place.lock, about):
        said = thinwire("aggregator", "status", "--home", home).out
        assert "api      0.0.0.0:9090 (TLS; https://agg.example:9090)" in said
        assert "waiting to be approved: pi-01" in said
        document = json.loads(thinwire("aggregator", "status", "--json", "--home", home).out)
        assert (document["waiting"], document["pin"]) == (["pi-01"], "cd" * 32)
        assert thinwire("devices", "list", "--json", "--home", home).document[0]["online"] is False
    assert thinwire("devices", "list", "--json", "--home", home).document[0]["online"] is None


def test_the_runs_of_the_queue_are_in_the_status_and_behind_which_they_wait(thinwire, home):
    for status in ("done", "queued", "running", "queued"):
        told(home, status)
    with hold(AggregatorHome.under(home).lock, {"listen": "127.0.0.1:9090", "dashboard": None}):
        said = thinwire("aggregator", "status", "--home", home).out
        assert said.splitlines()[-3:] == [
            "run      toy-3 running: 2 rounds",
            "run      toy-2 waiting in the queue behind toy-3, which is running",
            "run      toy-4 waiting in the queue behind toy-3 and toy-2; toy-3 is running",
        ]
        document = thinwire("aggregator", "status", "--json", "--home", home).document
        assert (document["running"], document["queued"]) == ("toy-3", ["toy-2", "toy-4"])
