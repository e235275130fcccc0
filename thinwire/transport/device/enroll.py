"""Enrollment: a device comes to trust an aggregator, and the aggregator to know the device, once, by an invitation.

`join` enrolls the device. The other public function reads the state of its enrollment (`EnrollmentStatus`), without a
change at the aggregator and without disturbing the client.

Invariant: the secret is sent only over a connection on which the CA that the invitation pins has verified the peer.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.core.errors import BadPayload, Refused, ThinwireError, Unreachable, UsageError
from thinwire.core.invitation import SYSTEM, Invitation
from thinwire.core.types import DEVICE_NAME
from thinwire.transport.device.connect import Address, connect_unverified
from thinwire.transport.device.http_client import Connection, HttpRequest, PollingReader, read_all, read_rest
from thinwire.transport.device.identity import MAX_CAS, ServerClock, Trust, readable
from thinwire.transport.device.session import no_answer_error, refusal_error
from thinwire.transport.protocol.certificates import server_name
from thinwire.transport.protocol.http import CA, JOIN, ApiError, pack
from thinwire.transport.protocol.signing import Signer

MAX_CA_BYTES = 65_536
STATES = ("approved", "pending")
TRIES, RETRY_S = 3, 1.0  # a lost response is requested again: the same secret with the same key gets the same response
ANSWER_S = 30.0  # time-out of the one request before anything is verified


@dataclass(frozen=True)
class EnrollmentResult:
    """The result of an enrollment.

    `name` and `state` (approved, pending) are those of the device's row. People compare `fingerprint`, that of the
    device's key.
    """

    name: str
    state: str
    fingerprint: str
    trust: Trust


def join(
    url: str,
    invitation: Invitation,
    key: ec.EllipticCurvePrivateKey,
    name: str,
    versions: Mapping[str, str],
    clock: ServerClock | None = None,
) -> EnrollmentResult:
    """Join the aggregator at `url` as `name`, and return the result; the caller stores
    `EnrollmentResult.trust.save(folder)`.

    Raises `Refused` if the peer does not have the pinned CA (nothing was sent then), the invitation is unusable, or the
    name exists already. Raises `Unreachable` if nobody answers, or not now.
    """
    address = Address.parse(url)
    if not address.tls:
        raise UsageError(
            f"{url} needs no invitation",
            why="without TLS, only devices on its machine are approved",
            hint=f"thinwire client start --aggregator {url}; or, with TLS: https://{address}",
        )
    trust = trust_of(url, invitation.pin)
    clock = clock or ServerClock()
    signer = Signer(key, clock.now)
    connection = Connection(address, signer, clock, lambda: trust)
    said = {"secret": invitation.secret, "name": name, "versions": dict(versions)}
    try:
        fields = _request_enrollment(
            connection, url, name, HttpRequest("POST", JOIN, pack(json.dumps(said).encode()), whole_key=True)
        )
    finally:
        connection.close()
    try:
        name_there, state, fingerprint = (str(fields[key]) for key in ("name", "state", "fingerprint"))
        cas = tuple(str(ca) for ca in fields["cas"])
        if fingerprint != signer.fingerprint or not DEVICE_NAME.fullmatch(name_there) or state not in STATES:
            raise ValueError("it speaks of another device")
    except (KeyError, TypeError, ValueError) as error:
        raise Unreachable(f"cannot read the answer of {url}", why=repr(error)) from error
    return EnrollmentResult(name_there, state, fingerprint, replace(trust.renewed(cas), name=name_there))


def trust_of(url: str, pin: str) -> Trust:
    """Return the trust anchors for `url` by an invitation's pin. Only public data is requested."""
    if pin == SYSTEM:
        return Trust(url, system=True)
    cas, name = _presented_cas(url)
    try:
        pins = dict(zip(readable(cas), cas, strict=True))
    except BadPayload as error:
        raise _other(url, "it shows no certificates that can be read") from error
    if pin not in pins:
        raise _other(url, f"its certificate has the pin {next(iter(pins))[:16]}.., the invitation says {pin[:16]}..")
    return Trust(url, (pins[pin],), server_name(pin) if name else "")


def _presented_cas(url: str) -> tuple[tuple[str, ...], str]:
    """Return the CAs that the unverified peer presents, and the server name that it has."""
    address = Address.parse(url)
    try:
        line = connect_unverified(address)
        try:
            made = http.client.HTTPConnection(address.host, address.port)
            made.sock = PollingReader(line.sock, ANSWER_S, _too_long)
            made.request("GET", CA)
            response = made.getresponse()
            data = read_all(response, MAX_CA_BYTES)
        finally:
            line.sock.close()
    except BadPayload as error:
        raise _other(url, "it does not answer as an aggregator does") from error
    except (OSError, http.client.HTTPException) as error:
        raise no_answer_error(error, url, tls=True) from error
    if response.status != 200:
        raise refusal_error(ApiError.read(response.status, data), url, tls=True)
    try:
        fields: Any = json.loads(data)
        return tuple(str(ca) for ca in fields["cas"][:MAX_CAS]), str(fields["server_name"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _other(url, "it does not answer as an aggregator does") from error


def _request_enrollment(connection: Connection, url: str, name: str, request: HttpRequest) -> dict[str, Any]:
    for left in reversed(range(TRIES)):
        try:
            with connection.request(request) as response:
                return dict(json.loads(read_all(response, MAX_CA_BYTES)))
        except ApiError as refusal:
            raise _refused(refusal, url, name) from refusal
        except ssl.SSLCertVerificationError as error:
            raise _other(url, f"it cannot prove that it is the one: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            if not left:
                raise no_answer_error(error, url, tls=True) from error
            time.sleep(RETRY_S)
        except (ValueError, TypeError, RecursionError, BadPayload) as error:
            raise Unreachable(f"cannot read the answer of {url}", why=str(error)) from error
    raise AssertionError("unreachable")


def _refused(refusal: ApiError, url: str, name: str) -> ThinwireError:
    """Return a refused enrollment as an error: `Refused` if trying again later cannot help."""
    error = refusal_error(refusal, url, tls=True, name=name)
    final = refusal.kind in ("invitation", "name", "revoked", "protocol")
    return Refused(error.what, error.why, error.hint) if final else error


def _other(url: str, why: str) -> Refused:
    return Refused(
        f"who answers at {url} is not the aggregator of this invitation",
        why=f"{why}; nothing was sent",
        hint="look at the address; someone may stand in between: contact the aggregator's operator",
    )


def _too_long(silent_s: float) -> None:
    raise TimeoutError(f"nothing came for {silent_s:.0f} s")


NO_ASSIGNMENT = (
    "/tw/v1/assignments/thinwire.doctor/bundle"  # of no run: the refusal's kind shows if the device is approved
)


@dataclass(frozen=True)
class EnrollmentStatus:
    """The state of an enrollment.

    `error` is the reason why this device may not take part, None if it may. `skew_s` is how far its clock is behind,
    None if unknown. `kind` is the refusal's kind: the one for a missing assignment (approved), "hello" (on plain HTTP
    the first start makes the row), and so on.
    """

    kind: str
    fingerprint: str
    skew_s: float | None = None
    error: ThinwireError | None = None


def check_enrollment(
    url: str, trust: Trust | None, key: ec.EllipticCurvePrivateKey, name: str = "NAME"
) -> EnrollmentStatus:
    """Return this device's state at its aggregator; raise `Unreachable` if no trusted aggregator answers.

    `name` is its name for what to try, unless the aggregator has said another one.
    """
    clock = ServerClock()
    signer = Signer(key, clock.now)
    connection = Connection(Address.parse(url), signer, clock, lambda: trust)
    try:
        with connection.request(HttpRequest("GET", NO_ASSIGNMENT, whole_key=True)) as response:
            read_rest(response)
        return EnrollmentStatus("assignment", signer.fingerprint)
    except ApiError as refusal:
        skew_s = refusal.now - time.time() if refusal.now else None
        fine = (refusal.status, refusal.kind) in ((404, "assignment"), (401, "hello"))
        known, tls = (trust.name if trust else "") or name, trust is not None
        error = None if fine else refusal_error(refusal, url, tls=tls, name=known, fingerprint=signer.fingerprint)
        return EnrollmentStatus(refusal.kind, signer.fingerprint, skew_s, error)
    except (OSError, http.client.HTTPException) as error:
        raise no_answer_error(error, url, tls=trust is not None) from error
    finally:
        connection.close()
