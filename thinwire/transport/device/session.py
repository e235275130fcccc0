"""The device's side of a session with the aggregator: registration, assignments in flight, and what a failure means.

`Registration` registers the process and keeps what the aggregator answered. `InFlightAssignments` knows which
assignments the device has and which were withdrawn, because one thread pulls them and another thread replies to them.
`InFlightAssignments` also knows which runs belong to the aggregator of the last registration: another aggregator at the
same address may have runs with the same ids.

`translate_errors` turns the failure of a request into an error that decides what follows: the client tries again, gives
up this reply, or ends. Over TLS a client ends only if the verified aggregator reports that the device is revoked. Every
other request is tried again, because nobody may be at the device to start the client. On plain loopback the person at
this machine gets the error at once.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from thinwire.core.errors import BadPayload, NotAccepted, Refused, ThinwireError, Unreachable
from thinwire.core.fleet import Hello, Welcome
from thinwire.core.formatting import grouped, plain
from thinwire.core.protocol import ends
from thinwire.core.types import Assignment, Reply
from thinwire.transport.device.http_client import Connection, HttpRequest, read_block, read_rest
from thinwire.transport.device.identity import ServerClock, Trust
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, ApiError, pack

MIN_REPORTED_SKEW_S = 5.0  # a smaller skew is reported as 0


class Registration:
    """Registers the client's process, and stores in `folder` what the aggregator answered, for the next start.

    `spread_s` is the time in seconds over which devices reconnect after all of them lost the aggregator. It is known
    before the first registration too, because a power cut may have hit the devices as well. `names` are all names that
    the aggregator gave this device since the process started, and the one that it started with.
    """

    def __init__(self, name: str, folder: Path, trust: Trust | None, clock: ServerClock) -> None:
        self.name, self._folder, self._clock = name, folder, clock
        self.trust = trust
        self.names = {name}  # the first name stays valid until the process ends, even if the device is renamed
        self.spread_s = trust.spread_s if trust else 0.0
        self._first = True

    def register(self, hello: Hello, connection: Connection, pause: Callable[[], None]) -> Welcome:
        """Register the process, and return the aggregator's answer.

        It registers a second time if the answer changed what the device reports: its CAs, or the skew of its clock.
        Before the first registration it calls `pause` if `spread_s` is at least one second.
        """
        if self._first and self.spread_s >= 1.0:
            pause()
        self._first = False
        said, welcome = self._send(hello, connection)
        if (said.trusted_pins, said.link["skew_s"]) != (self.trusted_pins, self.skew_s):
            _, welcome = self._send(hello, connection)
        return welcome

    @property
    def trusted_pins(self) -> tuple[str, ...]:
        """Return the pins of the CAs that the device trusts."""
        return self.trust.pins if self.trust else ()

    @property
    def skew_s(self) -> float:
        """Return the reported clock skew in whole seconds, 0 below `MIN_REPORTED_SKEW_S`."""
        skew_s = self._clock.skew_s
        return float(round(skew_s)) if abs(skew_s) >= MIN_REPORTED_SKEW_S else 0.0

    def _send(self, hello: Hello, connection: Connection) -> tuple[Hello, Welcome]:
        rtt_s = round(connection.open(), 6)
        said = replace(
            hello, link={**hello.link, "rtt_s": rtt_s, "skew_s": self.skew_s}, trusted_pins=self.trusted_pins
        )
        with connection.request(
            HttpRequest("POST", HELLO, pack(registration.to_bytes(said)), whole_key=True)
        ) as response:
            welcome = registration.welcome_from_bytes(read_block(response, registration.MAX_WELCOME_BYTES))
            read_rest(response)
        self._clock.learn(welcome.server_time)
        connection.require_dates()
        self._learn(welcome)
        return said, welcome

    def _learn(self, welcome: Welcome) -> None:
        self.name, self.spread_s = welcome.name, max(0.0, welcome.spread_s)
        self.names.add(welcome.name)
        if self.trust is not None:
            spread_s = float(round(self.spread_s))
            known = replace(self.trust.renewed(welcome.cas), name=welcome.name, spread_s=spread_s)
            if known != self.trust:
                known.save(self._folder)
                self.trust = known


REMEMBERED = 1024  # withdrawn assignments, and identities of runs


class InFlightAssignments:
    """The assignments in flight on a device, and the runs of the aggregator with which it registered last.

    Invariant: an assignment is in flight from its complete arrival until it is replied to or withdrawn, and the
    aggregator gives only others. A stop gets no reply: it is in flight until a pull that names it is answered.

    Invariant: no assignment is in flight, and no reply is sent, for a run whose identity is unknown. An identity is
    known from the last registration or from an assignment since then. An empty identity belongs to every aggregator.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[str, tuple[bool, str]] = {}  # assignment id -> is it a stop, and the identity of its run
        self._runs: OrderedDict[str, None] = OrderedDict()  # identities
        self._registrations = 0
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._open: dict[str, str] = {}  # run -> identity, of the runs of whose end the device does not know

    @property
    def open_runs(self) -> dict[str, str]:
        """Return the identities of the runs of whose end the device does not know, the latest `MAX_RUNS`, by run."""
        with self._lock:
            return dict(list(self._open.items())[-registration.MAX_RUNS :])

    def keep_open(self, runs: Mapping[str, str]) -> None:
        """Add runs of whose end the device does not know, with their identities."""
        with self._lock:
            self._open |= runs

    def take_ended(self, runs: Sequence[str]) -> dict[str, str]:
        """Remove and return those of these runs that are open, with their identities."""
        with self._lock:
            return {run: self._open.pop(run) for run in runs if run in self._open}

    def ids(self) -> list[str]:
        """Return the ids of the assignments in flight."""
        with self._lock:
            return list(self._in_flight)

    def withdrawn(self) -> frozenset[str]:
        """Return the ids of the assignments that were withdrawn."""
        with self._lock:
            return frozenset(self._withdrawn)

    @property
    def registrations(self) -> int:
        """Return how many times the device has registered."""
        return self._registrations

    def note_registration(self, identities: Iterable[str]) -> None:
        """Record the runs that continue at the aggregator, and withdraw the assignments of all other runs.

        Nobody waits for replies to those.
        """
        with self._lock:
            self._registrations += 1
            self._runs = OrderedDict.fromkeys(("", *identities))
            self._withdraw(
                [
                    assignment_id
                    for assignment_id, (_, identity) in self._in_flight.items()
                    if identity not in self._runs
                ]
            )

    def may_send(self, reply: Reply) -> bool:
        """Return True if the reply belongs to a run of the aggregator with which the device registered last."""
        with self._lock:
            return not self._registrations or reply.identity in self._runs

    def add(self, assignment: Assignment, registrations: int) -> None:
        """Record an assignment as in flight, also one that was withdrawn before and sent again.

        `registrations` is the count of registrations when the assignment was pulled.
        """
        with self._lock:
            if registrations == self._registrations:
                self._runs[assignment.identity] = None
                if len(self._runs) > REMEMBERED:
                    self._runs.popitem(last=False)
            self._in_flight[assignment.assignment_id] = assignment.kind == "stop", assignment.identity
            self._open.pop(assignment.run, None)
            if assignment.kind != "stop" and assignment.identity:
                self._open[assignment.run] = assignment.identity
            if len(self._open) > REMEMBERED:
                del self._open[next(iter(self._open))]
            self._withdrawn.pop(assignment.assignment_id, None)
            if assignment.identity not in self._runs:  # the device registered with another aggregator meanwhile
                self._withdraw([assignment.assignment_id])

    def remove_replied(self, reply: Reply) -> None:
        """Remove the assignments that a reply ends; an advertisement leaves its assignment in flight."""
        with self._lock:
            for assignment_id in [named for named in self._in_flight if ends(reply, named)]:
                del self._in_flight[assignment_id]

    def remove_stops(self, assignment_ids: Sequence[str]) -> None:
        """Remove the stops among the assignments that a pull named, because the aggregator answered that pull."""
        with self._lock:
            for assignment_id in assignment_ids:
                is_stop, _ = self._in_flight.get(assignment_id, (False, ""))
                if is_stop:
                    del self._in_flight[assignment_id]

    def clear(self) -> None:
        """Remove all assignments because another process begins, which receives them again."""
        with self._lock:
            self._in_flight.clear()

    def withdraw(self, control: bytes) -> None:
        """Withdraw the assignments that the control message `control` names; raise `BadPayload` if it is unreadable."""
        try:
            assignment_ids = [str(assignment_id) for assignment_id in json.loads(control).get("cancelled", ())]
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise BadPayload("cannot read what the aggregator says", why=str(error)) from error
        with self._lock:
            self._withdraw(assignment_ids)

    def _withdraw(self, assignment_ids: Iterable[str]) -> None:
        for assignment_id in assignment_ids:
            if self._in_flight.pop(assignment_id, None) is not None:  # an aggregator may withdraw only these
                self._withdrawn[assignment_id] = None
        while len(self._withdrawn) > REMEMBERED:
            self._withdrawn.popitem(last=False)


# Refusals of a reply, not of the device: the same bytes will never be accepted.
NEVER_ACCEPTED = frozenset({(409, "state-lost"), (409, "protocol"), (409, "run"), (413, "too-large"), (403, "device")})
SETTLING = frozenset({"state-lost", "too-large"})  # with these the aggregator has recorded the assignment as failed
# The same request may succeed later, also over plain HTTP.
TRANSIENT = frozenset(
    {"clock", "replay", "busy", "closing", "disk", "damaged", "hello", "internal", "writer", "offset"}
)

REFUSAL_TEXTS: dict[str, tuple[str, str]] = {  # {name} is the device's, {url} the aggregator's
    "revoked": ("has revoked this device", "contact its operator: thinwire devices approve {name} approves it again"),
    "pending": ("has not approved this device yet", "there, after comparing: thinwire devices approve {name}"),
    "unknown": ("does not know this device's key", "join it: thinwire client join {url} -"),
    "name": (
        "refused this client's name",
        "give it another one: --name NAME; or there: thinwire devices rename {name} OTHER",
    ),
    "process": ("hears this device from elsewhere too", "stop the other process, or give this one another name"),
    "protocol": ("does not speak this client's protocol", "update thinwire on the side that is older"),
    "ledger": ("cannot store what this device reports of its privacy ledger", "thinwire client privacy shows it"),
    "clock": ("does not take this device's clock", "set this machine's clock (timedatectl set-ntp true)"),
    "signature": ("does not take this client's signature", "is thinwire here as new as there?"),
    "state-lost": (
        "has another reply under this one's number",
        "this client's state directory is older than what it sent before: give it another --name",
    ),
    "too-large": ("does not accept a reply of this size", "contact its operator"),
    "device": ("does not accept another device's reply", "was this device renamed? Then its run is over"),
    "run": ("has another run of this name", "nothing to do: this client begins that run without its old state"),
    "disk": ("cannot write its state", "look at its disk: thinwire aggregator doctor"),
    "closing": ("is closing", "start it again there: thinwire aggregator start"),
    "joins": ("has seen too many joins fail from this address", "wait a minute, and paste the whole invitation"),
    "signatures": ("has seen too many wrong signatures from this address", "wait a minute; who shares the address?"),
    "dashboard": (
        "has its dashboard at this address, not its device API",
        "--aggregator with the address of its device API: there, thinwire aggregator status shows both",
    ),
    "invitation": ("takes no such invitation", (
        "each enrolls one device, for a while: contact its operator "
        "for another"
    )),
}  # fmt: skip


def refusal_error(
    refusal: ApiError,
    url: str,
    *,
    tls: bool,
    name: str = "NAME",
    fingerprint: str = "",
    pushes_reply: bool = False,
    within_s: float = 0.0,
) -> ThinwireError:
    """Return a refusal as an error of the device `name`; `pushes_reply` is True while it pushes a reply.

    `within_s` is the reconnect window in seconds.
    """
    text, hint = REFUSAL_TEXTS.get(refusal.kind, ("cannot answer now", "look at its output"))
    hint = hint.replace("{name}", name).replace("{url}", url)
    what, why = f"the aggregator at {url} {text}", "" if refusal.kind == "closing" else refusal.why
    if refusal.kind in ("pending", "unknown") and fingerprint:
        why = f"{why}; this device's key has the fingerprint {grouped(fingerprint)}"
    is_transient = refusal.kind in TRANSIENT or refusal.status in {429, 502, 503, 504}
    if refusal.kind == "http" and not is_transient:
        what, hint = f"{url} is no aggregator's device API", "look at the address: --aggregator URL"
    if pushes_reply and (refusal.status, refusal.kind) in NEVER_ACCEPTED:
        return NotAccepted(what, why, hint)
    if refusal.kind == "revoked" or not (tls or is_transient):
        return Refused(what, why, hint)
    return Unreachable(what, why, hint, after_s=refusal.retry_after_s, within_s=within_s)


NOT_NOW = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


@contextmanager
def translate_errors(
    url: str, tls: bool, name: str, fingerprint: str, within_s: float, ended: Callable[[], bool], pushes_reply: bool
) -> Iterator[None]:
    """Translate refusals and connection errors of this block into Thinwire errors.

    They mean: try again later, drop this reply, or stop the client.
    """
    try:
        yield
    except ApiError as refusal:
        raise refusal_error(
            refusal, url, tls=tls, name=name, fingerprint=fingerprint, pushes_reply=pushes_reply, within_s=within_s
        ) from refusal
    except (OSError, http.client.HTTPException) as error:
        if ended():
            raise Unreachable("this link was closed", why=str(error)) from error
        raise no_answer_error(error, url, tls=tls, within_s=within_s) from error


def no_answer_error(error: Exception, url: str, *, tls: bool, within_s: float = 0.0) -> Unreachable:
    """Return the error of a request that no trusted aggregator answered."""
    why = plain(getattr(error, "strerror", None) or str(error) or type(error).__name__)  # the text may quote a stranger
    what = f"cannot reach the aggregator at {url}"
    hint = "start it there (thinwire aggregator start); is the address right, does a firewall let it pass?"
    if isinstance(error, ssl.SSLCertVerificationError):
        what, why = f"the aggregator at {url} shows a certificate that this device does not trust", error.verify_message
        hint = "another party is in between, or it was set up again: contact its operator before thinwire client join"
        if error.verify_code in NOT_NOW:
            hint = "set this machine's clock (timedatectl set-ntp true); or the aggregator has to renew the certificate"
    elif isinstance(error, socket.gaierror):
        hint = "another name or an address that leads there: a device knows its aggregator by the pin"
    elif isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        why = "what answers there does not speak TLS"
        hint = "is the port right? A device API on loopback may be http://"
    elif isinstance(error, http.client.BadStatusLine) and not tls:
        hint = f"does it speak TLS? {url.replace('http://', 'https://', 1)}"
        if isinstance(error, ConnectionError):
            why, hint = "it hung up without an answer", f"it may just have ended; where it never answers: {hint}"
    return Unreachable(what, why, hint, within_s=within_s)
