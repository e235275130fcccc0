"""Alerts of the dashboard: a thread decides them from the store and sends their messages; routes show them.

Each look reads what may be wrong (`thinwire/reports/alerting.py`), opens and closes alerts in the store, and sends the
messages that are due to the targets of `aggregator.toml`: a webhook, e-mail, or none. A target that does not answer
gets the message later; nothing else waits for it. Only the dashboard that holds the state directory's lock looks, so
each message is sent by one process. The targets are read from the file at each look, and never from a request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import shutil
import smtplib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from email.message import EmailMessage
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import thinwire
from thinwire.core.clock import down_since_of, repeating
from thinwire.core.errors import ThinwireError
from thinwire.core.formatting import with_home
from thinwire.core.owner_file import AggregatorFile, AlertSettings, aggregator_file
from thinwire.core.start_options import start_command
from thinwire.reports.alerting import CERTIFICATE, OFFLINE, AlertContext, conditions
from thinwire.store import ROLES, AlertRow, Store
from thinwire.web.access import API, Number, StoreDep, Who, visitor
from thinwire.web.problems import PROBLEMS
from thinwire.web.rows import as_csv
from thinwire.web.settings import aggregator, home_option

ALERTS_READ_S: Final = 10.0  # between two reads of the conditions that raise an alert
SEND_S: Final = 10.0  # time limit of one read or write of a message
ANSWER_S: Final = 20.0  # time limit of the head of a webhook's answer, in all
log = logging.getLogger("thinwire.alerts")
Send = Callable[[str, AlertSettings, dict[str, Any]], None]
WEBHOOK: Final = "webhook"
EMAIL: Final = "email"
MAX_ALERTS: Final = 1000  # in one answer


class AlertWatch:
    """Looks at the store and its surroundings, and keeps the alerts as they should be."""

    def __init__(self, store: Store, lock: Path, send: Send | None = None) -> None:
        self._store, self._lock, self._send = store, lock, send or deliver
        self._settings = AggregatorFile()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Look every `ALERTS_READ_S` seconds in a thread while the block runs."""
        with repeating(self._look_safely, ALERTS_READ_S, "alerts"):
            yield

    def look(self) -> None:
        """Open and close alerts, then send what is due; a message that fails is due again later."""
        with contextlib.suppress(ThinwireError):  # a wrong file: the aggregator refuses it at its next start
            self._settings = aggregator_file(self._lock.parent.parent)
        wanted = self._settings.alerts
        found, unknown = conditions(self._store, self._around(), wanted)
        home = home_option(self._lock)
        self._store.alerts.update([replace(one, hint=with_home(one.hint, home)) for one in found], unknown)
        silent = set[str]()  # targets: each is waited for once in a look, however many messages are due
        for row in self._store.alerts.due():
            self._tell(row, wanted, silent)

    def _tell(self, row: AlertRow, wanted: AlertSettings, silent: set[str]) -> None:
        """Send the message that is due to each target that did not get it yet, and note which did not answer."""
        change = row.due
        assert change is not None, "the store returns rows with a message to send"
        took, failures = set(row.sent_to.split()), list[str]()
        for target in [WEBHOOK] * bool(wanted.webhook) + [EMAIL] * bool(wanted.email_to):
            if target in silent and target not in took:
                failures.append(f"{target}: it did not answer the message before")
            elif target not in took:
                try:
                    self._send(target, wanted, message(row, change))
                    took.add(target)
                except Exception as error:  # whatever a target answers, the others get theirs
                    failures.append(f"{target}: {type(error).__name__}: {error}")
                    if not isinstance(error, urllib.error.HTTPError | smtplib.SMTPResponseException):
                        silent.add(target)
        if failures:
            self._store.alerts.not_sent(row, "; ".join(failures), " ".join(sorted(took)))
        else:
            self._store.alerts.sent(row, change)

    def _look_safely(self) -> None:
        try:
            self.look()
        except ThinwireError as error:  # the store is not readable now; the next look tries again
            log.warning("alerts: %s", error)

    def _around(self) -> AlertContext:
        state, about = aggregator(self._lock)
        until, free = _ends_at(str(about.get("certificate") or "")), None
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self._lock.parent).free
        down_since = (down_since_of(self._lock) or time.time()) if state == "gone" else None
        return AlertContext(time.time(), down_since, free, until, f"thinwire {start_command(self._lock.parent)}")


def _ends_at(certificate: str) -> float | None:
    """Return when the certificate in a PEM file ends, wall clock; None without one: the aggregator renews its own."""
    if not certificate:
        return None
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(Path(certificate).read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def message(row: AlertRow, change: str) -> dict[str, Any]:
    """Return what is sent about an alert: plain facts by name."""
    at = row.opened_at if change == "opened" else row.closed_at
    said = {"alert": row.id, "kind": row.kind, "run_id": row.subject, "change": change, "at": at}
    return {**said, "sentence": row.sentence, "try": row.hint if change == "opened" else ""}


def deliver(target: str, wanted: AlertSettings, said: dict[str, Any]) -> None:
    """Send a message to a target; raise an exception of any kind if it does not take it."""
    if target == WEBHOOK:
        _post(wanted.webhook, said)
    else:
        _mail(wanted, said)


class _Connection(http.client.HTTPConnection):
    """Ends once the head of an answer has taken `ANSWER_S`: each byte begins the socket's own time limit again."""

    def getresponse(self) -> http.client.HTTPResponse:
        """Return the answer; a target that is cut off before its status line is complete raises an exception."""
        cut = threading.Timer(ANSWER_S, _cut_off, [self.sock])
        cut.daemon = True
        cut.start()
        try:
            return super().getresponse()
        finally:
            cut.cancel()


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """Ends as `_Connection` does."""


def _cut_off(sock: socket.socket) -> None:
    """End a connection while another thread reads from it; after `SSLSocket.shutdown` it would read without TLS."""
    with contextlib.suppress(OSError):  # it has ended
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler):
    """Connects in bounded time, and follows no redirect: the file names the target, which may not name another one."""

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, request)

    def redirect_request(self, *given: object, **named: object) -> None:
        return None


def _post(url: str, said: dict[str, Any]) -> None:
    """Send a message by POST; an answer of 300 and above raises HTTPError, which is an OSError."""
    headers = {"Content-Type": "application/json", "User-Agent": f"thinwire/{thinwire.__version__}"}
    request = urllib.request.Request(url, json.dumps(said).encode(), headers)  # noqa: S310 - the file allows http only
    with urllib.request.build_opener(_Handler).open(request, timeout=SEND_S):
        pass


def _mail(wanted: AlertSettings, said: dict[str, Any]) -> None:
    """Send a message by e-mail."""
    letter = EmailMessage()
    begins = "Thinwire" if said["change"] == "opened" else "Over"
    letter["Subject"] = " ".join(f"{begins}: {said['sentence']}".split())  # a header has one line
    letter["From"], letter["To"] = wanted.email_from or wanted.email_to[0], ", ".join(wanted.email_to)
    letter.set_content("\n".join(f"{name}: {value}" for name, value in said.items() if value not in ("", None)))
    host, _, port = wanted.smtp.rpartition(":")
    verified = ssl.create_default_context()  # smtplib's own context verifies nothing
    with (
        smtplib.SMTP_SSL(host, int(port), timeout=SEND_S, context=verified)
        if wanted.smtp_security == "tls"
        else smtplib.SMTP(host, int(port), timeout=SEND_S)
    ) as server:
        if wanted.smtp_security == "starttls":
            server.starttls(context=verified)
        if wanted.smtp_user:
            server.login(wanted.smtp_user, Path(wanted.smtp_password_file).read_text().strip())
        server.send_message(letter)


class ShownAlert(BaseModel):
    """Holds an alert as the dashboard shows it; times are wall-clock seconds."""

    id: int
    kind: str
    subject: str
    sentence: str
    hint: str
    opened_at: float
    closed_at: float | None
    acknowledged_by: str
    acknowledged_at: float | None
    opening_sent_at: float | None
    closing_sent_at: float | None
    failures: int
    failure: str


router = APIRouter(prefix=API, responses=PROBLEMS)
STARTS_AGAIN: Final = (OFFLINE, CERTIFICATE)  # kinds whose hint is a command that starts the aggregator
STARTED_BY: Final = "an operator starts the aggregator again, on its machine"


@router.get("/alerts")
def alerts(
    store: StoreDep, request: Request, limit: Annotated[int, Query(ge=1, le=MAX_ALERTS)] = 200
) -> list[ShownAlert]:
    """Return open and closed alerts, newest first.

    A command that starts the aggregator again may name paths of keys, and the failure of a message its target: a
    viewer, who changes neither, gets none.
    """
    found = [ShownAlert(**asdict(row)) for row in store.alerts.all(limit)]
    if visitor(request).person.role == ROLES[0]:
        for one in found:
            one.hint = STARTED_BY if one.kind in STARTS_AGAIN else one.hint
            one.failure = one.failure and "an operator sees why"
    return found


@router.get("/alerts.csv", response_class=Response, include_in_schema=False)
def alerts_csv(store: StoreDep, request: Request) -> Response:
    """Return open and closed alerts, newest first."""
    return as_csv(alerts(store, request, MAX_ALERTS), ShownAlert, "alerts")


@router.post("/alerts/{number}/acknowledge")
def acknowledge(store: StoreDep, number: Number, who: Who) -> ShownAlert:
    """Note that a person has seen the alert."""
    return ShownAlert(**asdict(store.alerts.acknowledge(number, who)))
