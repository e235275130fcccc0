"""How a message of an alert reaches its target: a webhook in bounded time, a mail over TLS that is verified."""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.certificates import Authority
from thinwire.core.owner_file import AlertSettings
from thinwire.store import Condition, Store
from thinwire.web import alerts
from thinwire.web.alerts import deliver, message

PATIENCE_S = 20.0


@contextmanager
def dripping(begun: bytes, ended: threading.Event, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A webhook on this machine that answers with `begun` and then a byte now and then, until it has `ended`."""

    def drip() -> None:
        connection, _ = server.accept()
        with suppress(OSError), tls.wrap_socket(connection, server_side=True) if tls else connection as answering:
            answering.recv(65536)
            answering.sendall(begun)
            while not ended.wait(0.02):
                answering.sendall(b"0")  # until the sender has closed the connection

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://localhost:{server.getsockname()[1]}/"
        finally:
            ended.set()
            thread.join(PATIENCE_S)


def failure_of(url: str) -> str:
    """Send a message to a webhook, and return why it was not sent, "" if it was; fail if that does not end."""
    failures = list[str]()

    def send() -> None:
        try:
            deliver("webhook", AlertSettings(webhook=url), {"alert": 1})
            failures.append("")
        except Exception as error:
            failures.append(str(error))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(PATIENCE_S)
    assert failures, "it is still being sent"
    return failures[0]


@pytest.mark.parametrize("begun", [b"HTTP/1.", b"HTTP/1.1 204 OK\r\nx: "])
@pytest.mark.parametrize("tls", [False, True])
def test_a_webhook_that_sends_a_byte_now_and_then_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool, begun: bytes
) -> None:
    monkeypatch.setattr(alerts, "ANSWER_S", 0.1)
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with dripping(begun, threading.Event(), authority.chain(tmp_path) if tls else None) as url:
        failure = failure_of(url)
    assert "CERTIFICATE" not in failure
    assert failure or b"204" in begun, "without a status line nothing says that it took the message"


def test_the_certificate_of_a_webhook_is_verified(tmp_path: Path) -> None:
    with dripping(b"HTTP/1.1 204 OK\r\n\r\n", threading.Event(), Authority().chain(tmp_path)) as url:
        assert "CERTIFICATE_VERIFY_FAILED" in failure_of(url)


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
