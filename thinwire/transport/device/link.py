"""Connect a device to its aggregator over HTTPS: `HttpsLink` registers, pulls assignments and pushes replies.

It needs neither Flower nor torch, only the standard library's HTTP and TLS, and a key. One connection waits for
assignments, the other one pushes replies. The caller decides when to try again (`Retrier` in client/calls.py): a
request that fails raises `Unreachable` at once, which names the delay and the reconnect window. Only a transfer that
makes progress between two cuts is continued in here.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.core.errors import NotAccepted, NotOffered, NotWritten, Refused, ReplyUnreadable, Unreachable, UsageError
from thinwire.core.fleet import Delivery, Hello, Welcome
from thinwire.core.protocol import ends
from thinwire.core.serialization import MAX_HEADER_BYTES, assignment_from_bytes, reply_to_bytes
from thinwire.core.types import Assignment, Failure, PhaseReply, Reply, ReplyHeader
from thinwire.transport.device.connect import Address, Proxy, TlsConnection, has_new_address
from thinwire.transport.device.http_client import (
    ADDRESS_CHECK_S,
    AddressChanged,
    Connection,
    HttpRequest,
    read_block,
    read_rest,
    translate_disk_errors,
)
from thinwire.transport.device.identity import ServerClock, Trust
from thinwire.transport.device.session import SETTLING, InFlightAssignments, Registration, translate_errors
from thinwire.transport.device.transfers import Incoming, Outgoing
from thinwire.transport.protocol.http import INLINE_BYTES, LEAVE, PULL, PUSH, ApiError, pack
from thinwire.transport.protocol.signing import Signer

MAX_CONTROL_BYTES = 64 * 2**10  # of a pull's control message: it names some of the ids that the pull named
MAX_IN_FLIGHT = 64  # assignments in flight: a run has one for each round of its overlap, at most 17
POLL_JITTER = 0.1  # share of a pull's wait, so that devices that connected together do not poll together


@dataclass(frozen=True)
class LinkOptions:
    """Holds what the client decides for its link, and what tests replace.

    `is_wanted` decides about a large assignment before its parts are fetched. `min_free` gives the bytes of disk that
    downloads leave free. `booked` gives the counts, the head and the earlier keys of the device's privacy ledger, for
    each registration. The link calls `has_new_address` every `check_every_s` seconds of
    silence, and connects again if this machine has another address.
    """

    clock: ServerClock | None = None
    is_wanted: Callable[[Assignment], bool] = lambda assignment: True
    min_free: Callable[[], int] = lambda: 0
    booked: Callable[[], tuple[Mapping[str, int], str, tuple[str, ...]]] | None = None
    check_every_s: float = ADDRESS_CHECK_S
    has_new_address: Callable[[TlsConnection], bool] = lambda line: has_new_address(line.sock)


class HttpsLink:
    """Connects the device `name` to the aggregator at `url`.

    Downloads go to `folder`/downloads. `trust` is what `join` left in `folder`, where it is kept up to date. Without it
    the aggregator must be reached by plain HTTP on loopback.

    The link reports which assignments the device has. The aggregator gives an assignment again until it arrived
    complete, and not after that. After a restart of the aggregator the link registers again by itself.

    A large assignment that is not wanted is delivered without its parts, because the client will decline it. One that
    does not fit on this disk is delivered without its parts too, together with the error, so that nobody waits for a
    reply.

    Invariant: a reply is sent only to an aggregator that has its run (`InFlightAssignments`). If another process than
    before may answer, the link registers first.
    """

    def __init__(
        self,
        url: str,
        key: ec.EllipticCurvePrivateKey,
        name: str,
        folder: Path,
        trust: Trust | None = None,
        options: LinkOptions = LinkOptions(),
    ) -> None:
        address = Address.parse(url)
        if address.tls != (trust is not None):
            raise UsageError(
                f"this device has {'not joined' if address.tls else 'joined another aggregator than'} {url}",
                why="over TLS it must know whom to trust" if address.tls else "what it joined speaks TLS",
                hint="thinwire client join URL -" if address.tls else f"--aggregator {trust.url if trust else ''}",
            )
        Proxy.towards(address)  # `UsageError` now if HTTPS_PROXY is not valid
        self.url, self.clock = url, options.clock or ServerClock()
        self._registration = Registration(name, folder, trust, self.clock)
        self._options = options
        signer = Signer(key, self.clock.now)
        self.fingerprint = signer.fingerprint

        def connection() -> Connection:
            trust_now, check_every_s = lambda: self._registration.trust, options.check_every_s
            return Connection(
                address,
                signer,
                self.clock,
                trust_now,
                check_every_s=check_every_s,
                has_new_address=options.has_new_address,
            )

        self._pulling, self._pushing = connection(), connection()
        self._incoming = Incoming(folder / "downloads", options.min_free)
        self._outgoing = Outgoing(self._pushing, self._pause)
        self._ending = threading.Event()
        self._hello: Hello | None = None
        self._registering = threading.Lock()  # two threads may register, and the newest data must arrive last
        self._in_flight = InFlightAssignments()
        self._ended: deque[Delivery] = deque()  # stops of runs that ended while the device was offline

    def hello(self, hello: Hello) -> Welcome:
        """Register the client's process, and return the aggregator's answer.

        Raises `Refused` if `hello` has another name than this link.
        """
        if hello.name not in self._registration.names:
            raise Refused(f"this link is {self._registration.name!r}'s", why=f"the hello says {hello.name!r}")
        if self._hello is None or self._hello.process != hello.process:
            self._in_flight.clear()
            self._in_flight.keep_open(hello.open_runs)
        with self._translate_errors(), self._registering:
            free = self._pulling if self._hello is None else self._pushing  # a pull may use the other one
            welcome = self._register(hello, free)
            self._hello = hello
        return welcome

    def pull(self, wait_s: float) -> Delivery | None:
        """Wait up to about `wait_s` seconds for an assignment; return None if there was none.

        It registers again first if the aggregator demands it. Raises `Unreachable` if no aggregator answers.

        The end of a run that a registration reported is returned as a stop.
        """
        if self._ended:
            return self._ended.popleft()
        wait_s *= random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)
        with self._translate_errors():
            self._require_time(self._pulling)
            return self._pull_again(wait_s)

    def push(self, reply: Reply, bundle: Path | None = None) -> None:
        """Send a reply, with its parts from the file `bundle`; return once the aggregator has committed it.

        Raises `NotOffered` if the run is not the aggregator's, and `ReplyUnreadable` if `bundle` is not readable or has
        another length than announced.
        """
        header = reply_to_bytes(reply)
        length = reply.payload_bytes if isinstance(reply, ReplyHeader) else 0
        body = _read(bundle, length)
        with self._translate_errors():
            self._require_time(self._pushing)
            self._require_known_peer()
        if not self._in_flight.may_send(reply):
            raise self._not_offered(reply)
        try:
            with self._translate_errors(pushes_reply=True):
                if isinstance(reply, ReplyHeader) and bundle is not None and length > INLINE_BYTES:
                    self._outgoing.send(reply, header, bundle)
                else:
                    self._call(self._pushing, HttpRequest("POST", PUSH, pack(header) + body))
        except NotAccepted as error:
            if isinstance(error.__cause__, ApiError) and error.__cause__.kind in SETTLING:
                self._in_flight.remove_replied(reply)
            raise
        self._in_flight.remove_replied(reply)

    def answer(self, reply: PhaseReply | Failure, wait_s: float) -> Delivery | None:
        """Send a message of a phase of secure aggregation on the connection that pulls, and wait as `pull` does.

        One request does both. Sending the message again is harmless.
        """
        wait_s *= random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)
        with self._translate_errors():
            self._require_time(self._pulling)
            if not self._pulling.is_peer_known():
                with self._registering:
                    self._register(self._last_hello(), self._pulling)
        if not self._in_flight.may_send(reply):
            raise self._not_offered(reply)
        with self._translate_errors(pushes_reply=True):
            return self._pull_again(wait_s, reply)

    def leave(self) -> None:
        """Revoke this device by its own wish. Its key is useless afterwards, and the caller deletes it."""
        with self._translate_errors():
            self._call(self._pushing, HttpRequest("POST", LEAVE))

    def cancelled(self) -> frozenset[str]:
        """Return the ids of withdrawn assignments."""
        return self._in_flight.withdrawn()

    def close(self) -> None:
        """End the link from any thread; a pull or push in progress raises `Unreachable`."""
        self._ending.set()
        self._pulling.close()
        self._pushing.close()

    def _require_time(self, connection: Connection) -> None:
        """Register again if the learned time was discarded, because no certificate is checked without a time."""
        if self.clock.doubted:
            with self._registering:
                self._register(self._last_hello(), connection)

    def _require_known_peer(self) -> None:
        """Register again if no connection to the registered process is open, because another process may answer now."""
        if self._hello is not None and not (self._pushing.is_peer_known() or self._pulling.is_peer_known()):
            with self._registering:
                self._register(self._last_hello(), self._pushing)

    def _register(self, hello: Hello, connection: Connection) -> Welcome:
        hello = replace(hello, open_runs=self._in_flight.open_runs)
        if self._options.booked is not None:  # as of now: the aggregator may be restored from an older backup
            booked, head, keys = self._options.booked()
            hello = replace(hello, booked=booked, booked_head=head, booked_keys=keys)
        welcome = self._registration.register(hello, connection, self._pause)
        self._in_flight.note_registration(welcome.runs.values())
        for run, identity in self._in_flight.take_ended(welcome.ended).items():
            stop = Assignment(f"{run}.stop.{welcome.name}", run, run.rpartition("-")[0], "stop", "", identity=identity)
            self._ended.append(Delivery(stop, device=welcome.name, missed=True))
        connection.mark_peer_known()
        return welcome

    def _not_offered(self, reply: Reply) -> NotOffered:
        run = reply.update_id.run if isinstance(reply, ReplyHeader) else reply.assignment_id.partition(".")[0]
        return NotOffered(
            f"what was made for {run} is not sent to the aggregator at {self.url}",
            why="the run is over, or is another aggregator's: here none that goes on has its name and its identity",
            hint="it is kept on this device, until a new run has its name; thinwire client leave deletes it",
        )

    def _last_hello(self) -> Hello:
        if self._hello is None:
            raise Unreachable("this link has not said hello yet", why="a hello comes before a pull")
        return self._hello

    def _pull_again(self, wait_s: float, reply: PhaseReply | Failure | None = None) -> Delivery | None:
        """Pull; again if this machine's address changed, and after a registration if the aggregator demands it."""
        try:
            return self._pull(wait_s, reply)
        except AddressChanged:
            return self._pull(wait_s, reply)
        except ApiError as refusal:
            if refusal.kind != "hello":
                raise
        with self._registering:  # the aggregator restarted, took this device offline, or has new CAs
            self._register(self._last_hello(), self._pulling)
        if reply is None:
            return self._ended.popleft() if self._ended else self._pull(wait_s)
        if not self._in_flight.may_send(reply):
            raise self._not_offered(reply)
        return self._pull(wait_s, reply)

    def _pull(self, wait_s: float, reply: PhaseReply | Failure | None = None) -> Delivery | None:
        """Pull once; `reply` is sent in the same request, and leaves the assignments in flight with its response."""
        in_flight, registrations = self._in_flight.ids(), self._in_flight.registrations
        if reply is not None:
            in_flight = [assignment_id for assignment_id in in_flight if not ends(reply, assignment_id)]
        with self._pulling.request(self._pull_request(wait_s, in_flight, reply)) as response:
            if reply is not None:
                self._in_flight.remove_replied(reply)
            self._in_flight.withdraw(read_block(response, MAX_CONTROL_BYTES))
            began = time.monotonic()
            data = read_block(response, MAX_HEADER_BYTES)
            assignment = assignment_from_bytes(data) if data else None
            if assignment and assignment.assignment_id not in in_flight and len(in_flight) >= MAX_IN_FLIGHT:
                raise Unreachable(
                    f"the aggregator sends more than {MAX_IN_FLIGHT} assignments at once",
                    why="each takes memory and disk until it is answered",
                )
            length = sum(part.length for part in assignment.parts) if assignment else 0
            bundle, error = None, None
            try:
                if assignment and 0 < length <= INLINE_BYTES:
                    bundle = self._incoming.take(assignment.parts, response)
            except NotWritten as refused:
                error = refused
            read_rest(response)
        self._pulling.mark_peer_known()  # only the process with which the device registered answers a pull
        self._in_flight.remove_stops(in_flight)
        if assignment is None:
            return None
        try:
            is_large = length > INLINE_BYTES and self._options.is_wanted(assignment)
            if is_large and (bundle := self._fetch(assignment)) is None:
                return None
        except NotWritten as refused:
            error = refused
        self._in_flight.add(assignment, registrations)
        return Delivery(assignment, bundle, time.monotonic() - began, error, self._registration.name, len(data))

    def _pull_request(self, wait_s: float, in_flight: list[str], reply: PhaseReply | Failure | None) -> HttpRequest:
        """Return the request for an assignment that is not in flight yet; it also sends `reply` if there is one."""
        fields = {"process": self._last_hello().process, "wait_s": wait_s, "in_flight": in_flight}
        pull = pack(json.dumps(fields, separators=(",", ":")).encode())
        if reply is None:
            return HttpRequest("POST", PULL, pull, wait_s=wait_s)
        prefer = {"prefer": f"wait={math.ceil(wait_s)}"}  # RFC 7240
        return HttpRequest("POST", PUSH, pack(reply_to_bytes(reply)) + pull, prefer, wait_s)

    def _fetch(self, assignment: Assignment) -> Path | None:
        """Fetch a large assignment's parts, and return their file; return None if it was withdrawn meanwhile.

        It tries again for as long as each attempt makes progress.
        """

        @contextmanager
        def get(start: int, tag: str) -> Iterator[http.client.HTTPResponse]:
            ranged = {"range": f"bytes={start}-", "if-range": tag} if start else {}
            with self._pulling.request(
                HttpRequest(
                    "GET", f"/tw/v1/assignments/{quote(assignment.assignment_id, safe='')}/bundle", headers=ranged
                )
            ) as response:
                yield response
                read_rest(
                    response
                )  # an unread response would end the connection, and with it the knowledge of its peer

        while True:
            before = self._incoming.size(assignment.parts)
            try:
                return self._incoming.fetch(assignment.parts, get)
            except ApiError as refusal:
                if refusal.status != 404:
                    raise
                return None
            except AddressChanged:
                continue
            except (OSError, http.client.HTTPException):
                if self._pulling.closed or self._incoming.size(assignment.parts) <= before:
                    raise
            self._pause()

    def _call(self, connection: Connection, request: HttpRequest) -> None:
        """Send one small request; repeat it at once if this machine's address changed in the middle of it."""
        try:
            with connection.request(request) as response:
                read_rest(response)
        except AddressChanged:
            with connection.request(request) as response:
                read_rest(response)

    def _pause(self) -> None:
        """Wait a random part of the reconnect window before a cut connection is dialled again.

        Other devices may have lost theirs too.
        """
        self._ending.wait(random.uniform(0.0, self._registration.spread_s))

    def _translate_errors(self, pushes_reply: bool = False) -> AbstractContextManager[None]:
        here = self._registration
        return translate_errors(
            self.url, here.trust is not None, here.name, self.fingerprint, here.spread_s, self._ending.is_set,
            pushes_reply,
        )  # fmt: skip


def _read(bundle: Path | None, length: int) -> bytes:
    """Return the file `bundle` if it travels inline, else b""; raise `ReplyUnreadable` unless it has `length` bytes."""
    data, there = b"", 0
    if bundle is not None:
        with translate_disk_errors(bundle):
            there = bundle.stat().st_size
            data = bundle.read_bytes() if there == length <= INLINE_BYTES else b""
    if there != length:
        raise ReplyUnreadable(f"the reply's parts have {there} bytes", why=f"its header announces {length}")
    return data
