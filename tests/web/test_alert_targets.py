"""A webhook has a bounded time for its answer, and over TLS it is verified."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from thinwire.core.owner_file import AlertSettings
from thinwire.web import alerts
from thinwire.web.alerts import deliver

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
