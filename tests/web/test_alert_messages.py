"""Messages of alerts: each change goes once to the webhook and by mail, and a target that fails gets it again."""

from __future__ import annotations

import http.client
import json
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.api_answers import Told
from thinwire.core.clock import DOWN_SINCE
from thinwire.core.owner_file import AlertSettings, aggregator_file
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import hold
from thinwire.store import Condition, Store
from thinwire.web.alerts import AlertWatch, deliver, message


@contextmanager
def target(status: int = 204, **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook on this machine, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *said: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", got
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The lock of an aggregator that runs; its settings are in HOME, above its folder."""
    folder = tmp_path / "aggregator"
    folder.mkdir()
    with hold(folder / "lock", {"listen": "127.0.0.1:9090"}):
        yield folder / "lock"


def settings(place: Path, text: str) -> None:
    (place.parent.parent / "aggregator.toml").write_text(f"[alerts]\n{text}\n")


def test_each_change_is_sent_once_to_the_webhook(store: Store, run: Told, place: Path):
    watch = AlertWatch(store, place)
    with target() as (url, got):
        settings(place, f'webhook = "{url}"\nno_progress_min = 1e-6\nmin_free_disk_mb = 0')
        watch.look()
        watch.look()
        run.status("done", "12 rounds")
        watch.look()
        watch.look()
    assert [(said["kind"], said["change"], said["run_id"]) for said in got] == [
        ("no-progress", "opened", run.run_id), ("no-progress", "closed", run.run_id),
    ]  # fmt: skip


def test_what_to_try_names_the_state_directory_and_how_the_aggregator_was_started(store: Store, run: Told, place: Path):
    home = place.parent.parent
    settings(place, "no_progress_min = 1e-6\nmin_free_disk_mb = 0")
    AlertWatch(store, place).look()
    (row,) = store.alerts.open()
    assert row.hint == f"thinwire runs show --home {home} {run.run_id} --why; thinwire aggregator logs --home {home}"
    down = home / "down" / "aggregator" / "lock"
    down.parent.mkdir(parents=True)
    down.write_text(json.dumps({DOWN_SINCE: time.time() - 180.0}))
    StartOptions({"listen": "0.0.0.0:9443"}).save(down.parent)
    settings(down, "min_free_disk_mb = 0")
    AlertWatch(store, down).look()
    (row,) = [one for one in store.alerts.open() if one.kind == "aggregator-offline"]
    assert row.hint == f"thinwire aggregator start --home {home}/down --listen 0.0.0.0:9443; runs go on then"


def test_a_webhook_that_fails_or_redirects_is_tried_again_and_says_why(store: Store, place: Path):
    watch = AlertWatch(store, place)
    with target(302, Location="http://127.0.0.1:1/other") as (url, got):
        settings(place, f'webhook = "{url}"\nmin_free_disk_mb = 1000000000')
        watch.look()
        assert len(got) == 1
    (row,) = store.alerts.open()
    assert (row.failures, row.opening_sent_at) == (1, None)
    assert "302" in row.failure


def test_a_target_that_answers_something_else_than_http_does_not_end_the_alerts(store: Store, place: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"garbage not http\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        settings(place, f'webhook = "http://127.0.0.1:{server.getsockname()[1]}/"\nmin_free_disk_mb = 1000000000')
        AlertWatch(store, place).look()
        thread.join(20)
    assert "BadStatusLine" in store.alerts.open()[0].failure


def test_a_target_that_has_the_message_does_not_get_it_again_while_another_fails(store: Store, place: Path):
    tries, broken = list[str](), True

    def send(target: str, wanted: AlertSettings, said: dict[str, Any]) -> None:
        tries.append(f"{target} {said['change']}")
        if target == "email" and broken:
            raise http.client.IncompleteRead(b"")

    settings(place, 'webhook = "http://x/"\nemail_to = ["a@example.org"]\nmin_free_disk_mb = 1000000000')
    watch, clock = AlertWatch(store, place, send), store.alerts._clock
    watch.look()
    (row,) = store.alerts.open()
    assert (row.failures, row.sent_to, row.opening_sent_at) == (1, "webhook", None)
    broken = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(clock), "wall", lambda _: time.time() + 60)
        watch.look()
    settings(place, 'webhook = "http://x/"\nemail_to = ["a@example.org"]\nmin_free_disk_mb = 0')
    watch.look()
    assert tries == ["webhook opened", "email opened", "email opened", "webhook closed", "email closed"]


def test_a_target_that_does_not_answer_is_tried_once_in_a_look(store: Store, place: Path, monkeypatch):
    tries = list[str]()

    def send(target: str, _wanted: AlertSettings, said: dict[str, Any]) -> None:
        tries.append(f"{target} {said['sentence']}")
        assert target == "email", "the webhook does not answer"

    monkeypatch.setattr("thinwire.web.alerts.conditions", lambda *_: ([Condition("disk", n, n) for n in "12"], {}))
    settings(place, 'webhook = "http://x/"\nemail_to = ["a@example.org"]')
    AlertWatch(store, place, send).look()
    assert tries == ["webhook 1", "email 1", "email 2"]


def test_a_mail_over_tls_verifies_the_server(monkeypatch: pytest.MonkeyPatch):
    contexts = list[ssl.SSLContext]()

    def connect(host: str, port: int, timeout: float, context: ssl.SSLContext) -> Any:
        contexts.append(context)
        raise OSError("far enough")

    monkeypatch.setattr(smtplib, "SMTP_SSL", connect)
    wanted = AlertSettings(email_to=("ann@example.org",), smtp="mail.example.org:465", smtp_security="tls")
    with pytest.raises(OSError, match="far enough"):
        deliver("email", wanted, {"sentence": "x", "change": "opened"})
    assert (contexts[0].verify_mode, contexts[0].check_hostname) == (ssl.CERT_REQUIRED, True)


def test_without_a_target_nothing_is_owed(store: Store, place: Path):
    settings(place, "min_free_disk_mb = 1000000000")
    AlertWatch(store, place).look()
    (row,) = store.alerts.open()
    assert (row.due, row.failures) == (None, 0)


def test_a_file_that_is_wrong_changes_nothing(store: Store, place: Path):
    watch = AlertWatch(store, place)
    settings(place, "min_free_disk_mb = 1000000000")
    watch.look()
    settings(place, 'min_free_disk_mb = "much"')
    watch.look()
    assert [one.kind for one in store.alerts.open()] == ["disk"]


def test_a_mail_names_the_alert_and_keeps_the_password_in_its_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[tuple[str, ...]] = []

    class Server:
        def __init__(self, host: str, port: int, timeout: float) -> None:
            calls.append(("connect", f"{host}:{port}"))

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def starttls(self, context: object) -> None:
            assert context is not None
            calls.append(("starttls",))

        def login(self, user: str, password: str) -> None:
            calls.append(("login", user, password))

        def send_message(self, letter: Any) -> None:
            calls.append((letter["To"], letter["From"], letter["Subject"], letter.get_content()))

    monkeypatch.setattr(smtplib, "SMTP", Server)
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    wanted = AlertSettings(
        email_to=("ann@example.org", "bob@example.org"), smtp="mail.example.org:587", smtp_security="starttls",
        smtp_user="thinwire", smtp_password_file=str(secret),
    )  # fmt: skip
    store.alerts.update([Condition("disk", "", "the disk has\n3 MB free", "free some space")])
    deliver("email", wanted, message(store.alerts.open()[0], "opened"))
    assert calls[:3] == [("connect", "mail.example.org:587"), ("starttls",), ("login", "thinwire", "hunter2")]
    to, sender, subject, text = calls[3]
    assert (to, sender) == ("ann@example.org, bob@example.org", "ann@example.org")
    assert subject == "Thinwire: the disk has 3 MB free"
    assert "try: free some space" in text


@pytest.mark.parametrize(
    "wrong",
    [
        'smtp_user = "u"\nsmtp = "mail.example.org:25"',
        'webhook = "http://x:0/"',
        'webhook = "http://x:99999/"',
        'webhook = "http://x:abc/"',
        'webhook = "file:///etc/passwd"',
        'webhook = "gopher://x"',
        'smtp = "mail"',
        "x = 1",
    ],
)
def test_a_target_that_is_none_is_refused_with_the_file(tmp_path: Path, wrong: str):
    (tmp_path / "aggregator.toml").write_text(f"[alerts]\n{wrong}\n")
    with pytest.raises(Exception, match="aggregator.toml"):
        aggregator_file(tmp_path)
