"""Authentication of requests at the device API.

`RequestAuthenticator` judges a request by its line and headers alone, before a request object exists or its body is
read. It does so in this order: path, on plain HTTP the browser's headers, length, key, time, signature, row of the
device, and last the nonce. A nonce is spent only by a request that is admitted. `RequestAuthenticator` does no I/O
except that it reads the roster.

`ReplayGuard` refuses replays. `Guests` describes the app behind the device API to which requests of stock Flower nodes
are forwarded.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinwire.core.clock import Clock, SteadyClock
from thinwire.core.fleet import DeviceRow, Roster
from thinwire.core.net import neighbourhood
from thinwire.transport.protocol.http import ApiError, Route, RouteMatch, find_route, unknown_path
from thinwire.transport.protocol.signing import LATEST_S, MAX_AHEAD_S, Identity, SignatureHeaders

LOOPBACK = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?")  # a Host header of this machine
MAX_BYTES = 64 * 2**20  # of a forwarded request's body: Flower sends objects in pieces of 5 MiB


def require_no_browser(headers: Mapping[bytes, bytes]) -> ApiError | None:
    """Return a refusal for a request that a browser may have sent, or None.

    It guards an address that only programs of this machine may call, but that a browser on the machine can reach too. A
    page whose name is rebound to this address sends that name as Host. With each POST a browser sends Origin or
    Sec-Fetch-Site, which name its sender (Fetch standard, section 3.2). Programs send neither.
    """
    if LOOPBACK.fullmatch(headers.get(b"host", b"")) and not headers.keys() & {b"origin", b"sec-fetch-site"}:
        return None
    return ApiError(403, "browser", "this address is for programs of this machine, not for pages")


class Guests(Protocol):
    """An ASGI app behind exact POST paths to which the device API forwards requests, and its rule of access."""

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths that are forwarded, compared byte for byte."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context in the event loop of the device API, entered for as long as the API listens."""

    def may_pass(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return the refusal of a request, judged by its headers alone, or None if it may pass."""

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the fingerprint of the key that signed a request that may pass.

        "" stands for any program of this machine.
        """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a forwarded request as an ASGI app."""


BODIES = ("POST", "PUT")  # methods whose requests have a body
BOUNDED = ("part", "push")  # the assignment and the upload bound the bodies of these routes
GUEST = Route("guest", "POST", "", "anyone", MAX_BYTES)


@dataclass(frozen=True)
class RequestHeader:
    """A request's line and headers, and the address that it came from.

    `signed` is True if an earlier request on the same connection was admitted.
    """

    method: str
    target: str
    headers: dict[bytes, bytes]
    address: str
    signed: bool = False


@dataclass(frozen=True)
class AuthenticatedRequest:
    """A request that may be served.

    `length` is the body's length in bytes. `row` is None if the key has no row yet. `claim` and `identity` are None if
    the request is not signed.
    """

    found: RouteMatch
    length: int
    claim: SignatureHeaders | None = None
    identity: Identity | None = None
    row: DeviceRow | None = None


class RequestAuthenticator:
    """Judges each request at the device API by its line and headers.

    `private` means plain HTTP on loopback, where the first registration of a key makes its row. Requests for `guests`
    are judged by their own rule (`Guests.may_pass`). `clock` gives the time by which devices sign. `room` gives the
    longest body in bytes that a device may send on a route of `BOUNDED`; the listener sets it.
    """

    def __init__(self, roster: Roster, clock: Clock, *, private: bool, guests: Guests | None = None) -> None:
        self._roster, self.clock, self._private, self._guests = roster, SteadyClock(clock), private, guests
        self._window = ReplayGuard(self.clock.wall())
        self.failed_joins = JoinRateLimiter()
        self.room: Callable[[DeviceRow, RouteMatch], int] = lambda row, at: at.route.most_bytes

    def judge(self, header: RequestHeader) -> AuthenticatedRequest:
        """Return the admitted request; raise `ApiError` if it may not be served."""
        at = find_route(header.method, header.target)
        if at is None and self._guests is not None and header.method == "POST" and header.target in self._guests.paths:
            return self._guest(header, self._guests)
        if at is None or (self._private and at.route.name in ("ca", "join")):
            raise unknown_path()
        if self._private and (refusal := require_no_browser(header.headers)) is not None:
            raise refusal  # a page would enroll a device, since any key may
        length = _length(header, at.route)
        if at.route.who == "anyone":
            return AuthenticatedRequest(at, length)
        if at.route.name == "join" and (wait_s := self.failed_joins.wait_s(header.address, self.clock.now())):
            raise ApiError(429, "joins", "too many joins failed from this address", retry_after_s=wait_s)
        claim = SignatureHeaders.read(header.headers)
        self._window.require_now(claim, self.clock.wall())
        row = self._roster.by_fingerprint(claim.fingerprint)
        if row is not None and not row.is_intact:
            raise ApiError(401, "unknown", f"the key of {row.name} is damaged in the aggregator's database")
        der = claim.der if claim.der is not None else row.public_key if row else None
        if der is None:
            raise self._stranger(at.route)
        if at.route.who == "stranger":
            row = None
        with self._counted(header, row.fingerprint if row else ""):
            claim.require_signature(der, header.method, header.target, length)
            if row is not None:
                self.require_may(row)
                if length and at.route.name in BOUNDED and length > (most := self.room(row, at)):
                    raise ApiError(413, "too-large", f"at most {most} bytes are taken here now")
            elif at.route.who == "device" or (at.route.who == "newcomer" and not self._private):
                raise self._stranger(at.route)
            if at.route.who != "stranger":  # a repeated join gets the same response as the first one
                self._window.spend(claim, self.clock.wall())
        return AuthenticatedRequest(at, length, claim, Identity(claim.fingerprint, der), row)

    def _guest(self, header: RequestHeader, guests: Guests) -> AuthenticatedRequest:
        length = _length(header, GUEST)
        with self._counted(header, "guest"):
            if (refusal := guests.may_pass(header.headers)) is not None:
                raise refusal
        return AuthenticatedRequest(RouteMatch(GUEST, {}, {}), length)

    @contextmanager
    def _counted(self, header: RequestHeader, key: str) -> Iterator[None]:
        """Count a refused signature; after too many for this address and key, verify none for a while.

        A connection on which the device was admitted is exempt. A stranger who knows the device's fingerprint and
        shares its address can delay its next connection by a minute. The stranger cannot interrupt its work.
        """
        if not (header.signed and key) and (wait_s := self.failed_joins.wait_s(header.address, self.clock.now(), key)):
            why = "too many requests with a wrong signature came from this address"
            raise ApiError(429, "signatures", why, retry_after_s=wait_s)
        try:
            yield
        except ApiError as refusal:
            if refusal.status == 401:
                refusal.verified = True
                self.failed_joins.failed(header.address, self.clock.now(), key)
            raise

    def still(self, row: DeviceRow) -> DeviceRow:
        """Return the device's present row; raise `ApiError` if the device was revoked while its request waited."""
        now = self._roster.by_fingerprint(row.fingerprint)
        if now is None:
            raise ApiError(401, "unknown", "this key is not known here any more")
        return self.require_may(now)

    def require_may(self, row: DeviceRow) -> DeviceRow:
        """Return the row; raise `ApiError` 403 if the device waits for approval or was revoked."""
        if row.state == "revoked":
            raise ApiError(403, "revoked", f"{row.name} was revoked")
        if row.state == "pending" or (row.how == "loopback" and not self._private):
            raise ApiError(403, "pending", f"{row.name} waits to be approved")
        if row.how == "stock":
            raise ApiError(403, "pending", f"{row.name} was approved as a stock Flower node, not as a Thinwire device")
        return row

    def _stranger(self, route: Route) -> ApiError:
        if route.name != "hello" and self._private:
            return ApiError(401, "hello", "this key is not known here: say hello")
        return ApiError(401, "unknown", "this key is not known here: join with an invitation")


def _length(header: RequestHeader, route: Route) -> int:
    """Return the body's length in bytes; raise `ApiError` 413 if it is too large or not declared."""
    said = header.headers.get(b"content-length")
    if b"transfer-encoding" in header.headers or (said is None and header.method in BODIES):
        raise ApiError(413, "too-large", "a request says its length")
    length = int(said) if said is not None and said.isdigit() and len(said) < 16 else 0 if said is None else -1
    if not 0 <= length <= route.most_bytes:
        raise ApiError(413, "too-large", f"at most {route.most_bytes} bytes are taken here")
    return length


Judge = Callable[[RequestHeader], AuthenticatedRequest]


MAX_OF_ONE = 8192  # nonces of one key within the window: 26 requests a second
MAX_OF_ALL = 1 << 20  # some 3 400 requests a second


class ReplayGuard:
    """The time window in which a signature is valid, and the nonces that were spent in it. It refuses replays.

    A timestamp from before this window was opened is refused: a restart forgets the nonces, and must not allow a
    replay. A `SteadyClock` gives the times: after a step back of the aggregator's clock the window goes on.

    Invariant: no request is served before the time that it is stamped with (the app waits for that time). Each served
    request is therefore stamped earlier than the next start, which refuses it. The invariant breaks if that start is at
    an earlier time than this window had: for as long as the clock was ever ahead since this window was opened.

    Both refusals because of a clock carry the aggregator's time. A device without a clock takes over that time and
    sends the request again.
    """

    def __init__(self, opened_at: float) -> None:
        self._opened_at = opened_at
        self._spent: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # in the order of their expiry
        self._of: defaultdict[str, int] = defaultdict(int)

    def require_now(self, claim: SignatureHeaders, now: float) -> None:
        """Raise `ApiError` 401 for a request that was signed outside of the window."""
        age_s = now - claim.signed_at()
        if not -MAX_AHEAD_S <= age_s < LATEST_S:
            raise ApiError(401, "clock", f"the device's clock is {age_s:+.1f} s behind the aggregator's", now=now)
        if claim.signed_at() < self._opened_at:
            raise ApiError(401, "clock", "the request was signed before the aggregator started", now=now)

    def spend(self, claim: SignatureHeaders, now: float) -> None:
        """Record the nonce of an admitted request; raise `ApiError` 401 if it was spent before.

        `ApiError` 503 is raised if the key, or all keys together, have spent too many nonces within the window.
        """
        while self._spent and next(iter(self._spent.values())) <= now:
            (key, _), _ = self._spent.popitem(last=False)
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]
        nonce = (claim.fingerprint, claim.nonce)
        if nonce in self._spent:
            raise ApiError(401, "replay", "this request was made before", now=now)
        if self._of.get(claim.fingerprint, 0) >= MAX_OF_ONE or len(self._spent) >= MAX_OF_ALL:
            raise ApiError(503, "busy", "too many requests in the last five minutes", retry_after_s=30.0)
        self._spent[nonce] = now + LATEST_S + MAX_AHEAD_S
        self._of[claim.fingerprint] += 1


FAILED_JOINS, FAILED_WITHIN_S = 10, 60.0
REMEMBERED = 65_536  # addresses with failed attempts


@dataclass
class JoinRateLimiter:
    """Limits an address to ten failed joins or refused signatures a minute.

    It must then wait until the oldest failure is a minute old. Failures with the key of a known device (`key`, its
    fingerprint) are counted separately. A stranger behind the same address can thus delay newcomers, but no known
    device.
    """

    _at: OrderedDict[tuple[str, str], deque[float]] = field(default_factory=OrderedDict)

    def wait_s(self, address: str, now: float, key: str = "") -> float:
        """Return the seconds until this address may try again, 0 if it may try now."""
        failed = self._at.get((neighbourhood(address), key))
        if failed is None or len(failed) < FAILED_JOINS:
            return 0.0
        return max(0.0, math.ceil(failed[0] + FAILED_WITHIN_S - now))

    def failed(self, address: str, now: float, key: str = "") -> None:
        """Record a failure of this address at the monotonic time `now`."""
        near = (neighbourhood(address), key)
        self._at.setdefault(near, deque(maxlen=FAILED_JOINS)).append(now)
        self._at.move_to_end(near)
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)
