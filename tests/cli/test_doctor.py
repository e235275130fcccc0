"""`thinwire aggregator doctor` and `ca`: a line for each thing, what to do where it is wrong, and nothing changed."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from tests.support import transport_doubles
from thinwire.cli.doctor import aggregator as aggregator_doctor
from thinwire.core.fleet import Hello, Joining
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.store import Store
from thinwire.transport.server.tls import InternalCA


@pytest.fixture
def place(home):
    place = AggregatorHome.under(home)
    with Store.open(place.database):
        pass
    return place


@contextmanager
def running(place, page=True, **about):
    """What looks like an aggregator with its page to who only looks."""

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        at = f"127.0.0.1:{server.server_port}"
        try:
            with hold(place.lock, {"version": "0.1.0", "listen": at, "dashboard": at if page else None, **about}):
                yield at
        finally:
            server.shutdown()
            thread.join()


def findings(said):
    return {row["what"]: row for row in said.document["findings"]}


def test_a_healthy_aggregator_is_ok_line_for_line(thinwire, home, place):
    with running(place):
        said = thinwire("aggregator", "doctor", "--json", "--home", home)
        assert said.code == 0, said.out
        assert list(findings(said)) == [
            "folder", "disk", "service", "kernels", "store", "clock", "devices", "device_api", "certificate",
            "dashboard",
        ]  # fmt: skip
        assert {row["ok"] for row in findings(said).values()} == {True}
        lines = thinwire("aggregator", "doctor", "--home", home).out.splitlines()
    assert all(line.startswith("ok ") for line in lines)


def test_a_folder_that_is_not_there_is_not_made(thinwire, home):
    said = thinwire("aggregator", "doctor", "--json", "--home", home)
    assert (said.code, findings(said)["folder"]["ok"], findings(said)["store"]["ok"]) == (1, False, None)
    assert findings(said)["kernels"]["ok"]
    assert not home.exists()


def test_without_a_process_it_says_how_one_is_started(thinwire, home, place):
    said = thinwire("aggregator", "doctor", "--home", home)
    assert (said.code, "failed  service" in said.out) == (1, True)
    assert "try: thinwire aggregator start" in said.out
    assert "1 of 10 failed" in said.err


@pytest.mark.parametrize(
    ("break_it", "what"),
    [
        (lambda place: place.root.chmod(0o755), "folder"),
        (lambda place: place.database.write_bytes(b"no database" * 1000), "store"),
        (lambda place: place.database.unlink(), "store"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(thinwire, home, place, break_it, what):
    break_it(place)
    with running(place):
        said = thinwire("aggregator", "doctor", "--json", "--home", home)
    assert (said.code, [name for name, row in findings(said).items() if row["ok"] is False]) == (1, [what])
    assert findings(said)[what]["try"]


def test_a_full_disk_is_said_before_it_is_full(thinwire, home, place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10_000_000}))
    with running(place):
        said = thinwire("aggregator", "doctor", "--json", "--home", home)
    assert (findings(said)["disk"]["ok"], "10 MB free" in findings(said)["disk"]["said"]) == (False, True)


def test_most_devices_are_believed_about_the_time(thinwire, home, place):
    with Store.open(place.database) as store:
        for number, skew in enumerate((-900.0, -901.0, 0.0)):
            name = f"pi-{number}"
            store.roster.enrol(name, f"{number:064x}", b"key", "invitation")
            store.roster.seen(Hello(name, name, link={"skew_s": skew}), time.time())
    with running(place):
        said = thinwire("aggregator", "doctor", "--json", "--home", home)
    assert "15 min behind most devices" in findings(said)["clock"]["said"]


def test_who_waits_for_approval_is_named(thinwire, home, place):
    with Store.open(place.database) as store:
        (invited,) = store.invitations.invite(approve_manually=True)
        store.roster.join(Joining(invited.secret, "pi-07", "7" * 64, b"key", "192.0.2.7"))
    with running(place):
        said = thinwire("aggregator", "doctor", "--json", "--home", home)
    assert "devices approve pi-07" in findings(said)["devices"]["try"]


def test_a_device_api_or_page_that_does_not_answer_is_found(thinwire, home, place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with hold(place.lock, {"listen": nobody, "dashboard": nobody}):
            said = thinwire("aggregator", "doctor", "--json", "--home", home)
    assert [name for name, row in findings(said).items() if row["ok"] is False] == ["device_api", "dashboard"]


def test_certificates_are_shown_and_an_old_leaf_is_found(thinwire, home, place):
    authority = InternalCA(place.root / "tls", ["agg.example"])
    with running(place, pin=authority.pin):
        found = findings(thinwire("aggregator", "doctor", "--json", "--home", home))["certificate"]
        assert found["ok"]
        assert all(word in found["said"] for word in (authority.pin, "agg.example", authority.server_name()))
        (row,) = thinwire("aggregator", "ca", "show", "--json", "--home", home).document
        assert (row["pin"], row["names"][0]) == (authority.pin, authority.server_name())


def test_a_leaf_that_ends_soon_is_a_finding(tmp_path):
    now = datetime.now(UTC)
    authority = InternalCA(tmp_path, (), now=lambda: now - timedelta(days=80))
    found = aggregator_doctor._certificate(tmp_path, {"pin": authority.pin, "listen": "127.0.0.1:1"})
    assert not isinstance(found, str)
    assert (found.ok, "thinwire aggregator start" in found.try_) == (False, True)


def test_a_certificate_that_the_operator_brought_is_looked_at_as_it_is_shown(tmp_path):
    with transport_doubles.place(tmp_path, tls=True) as api:
        about = {"pin": "system", "listen": api.fleet.address}
        said = aggregator_doctor._certificate(tmp_path / "none", about)
    assert isinstance(said, str)
    assert "pin system" in said
    assert "localhost" in said


def test_a_rotation_keeps_both_cas_and_new_invitations_name_the_new_one(thinwire, home, place):
    folder = place.root / "tls"
    before = InternalCA(folder, ["agg.example"]).pin
    (folder / "invite.json").write_text(json.dumps({"pin": before, "urls": ["https://agg.example:9090"]}))
    said = thinwire("aggregator", "ca", "rotate", "--san", "other.example", "--json", "--home", home)
    assert said.code == 0, said.err
    first, second = said.document
    assert (second["pin"], "other.example" in first["names"], "other.example" in second["names"]) == (
        before,
        True,
        False,
    )
    told = json.loads((folder / "invite.json").read_text())
    assert told == {"pin": first["pin"], "urls": ["https://agg.example:9090"]}
    assert "until every device holds the newest" in thinwire("aggregator", "ca", "show", "--home", home).out


def test_without_a_ca_there_is_none_to_show_or_rotate(thinwire, home, place, tmp_path):
    for verb in ("show", "rotate"):
        said = thinwire("aggregator", "ca", verb, "--home", home)
        assert (said.code, "--listen 0.0.0.0:9090" in said.err) == (9, True)
    StartOptions({"no_dashboard": True, "listen": "127.0.0.1:9191"}).save(place.root)
    said = thinwire("aggregator", "ca", "show", "--home", home).err
    assert f"try:   thinwire aggregator start --home {home} --listen 0.0.0.0:9191 --no-dashboard\n" in said
    StartOptions({"cert": "own one.pem", "key": "own.key"}, tmp_path).save(place.root)
    said = thinwire("aggregator", "ca", "show", "--home", home).err
    assert f"try:   openssl x509 -noout -text -in '{tmp_path}/own one.pem'\n" in said
    assert not (place.root / "tls").exists()
