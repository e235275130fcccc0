"""The meaning of a failed request on a device: try again, give up this reply, or end the client.

Over TLS only one thing ends a client: the verified aggregator reports that the device is revoked. Everything else is
tried again, because it may be fixed without anybody at the device. On plain loopback a person has both programs in
front of them, and gets the error at once.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinwire.core.errors import NotTaken, Refused, ThinwireError, Unreachable
from thinwire.core.formatting import grouped, plain
from thinwire.transport.protocol.http import ApiError

# Refusals of a reply, not of the device: the same bytes will never be accepted.
NEVER_TAKEN = frozenset({(409, "state-lost"), (409, "protocol"), (409, "run"), (413, "too-large"), (403, "device")})
# The same request may succeed later, also over plain HTTP.
PASSING = frozenset({"clock", "replay", "busy", "closing", "disk", "damaged", "hello", "internal", "writer", "offset"})

ABOUT: dict[str, tuple[str, str]] = {
    "revoked": ("has shut this device out", "ask its operator: thinwire devices approve NAME takes it back"),
    "pending": ("has not approved this device yet", "there, after comparing: thinwire devices approve NAME"),
    "unknown": ("does not know this device's key", "join it: thinwire client join URL -"),
    "name": (
        "refused this client's name",
        "give it another one: --name NAME; or there: thinwire devices rename NAME OTHER",
    ),
    "process": ("hears this device from elsewhere too", "stop the other process, or give this one another name"),
    "protocol": ("does not speak this client's protocol", "update thinwire on the side that is older"),
    "clock": ("does not take this device's clock", "set this machine's clock (timedatectl set-ntp true)"),
    "signature": ("does not take this client's signature", "is thinwire here as new as there?"),
    "state-lost": (
        "has another answer under this one's number",
        "this client's state folder is older than what it sent before: give it another --name",
    ),
    "too-large": ("does not take an answer of this size", "ask its operator"),
    "device": ("does not take another device's answer", "was this device renamed? Then its run is over"),
    "run": ("has another run of this name", "nothing to do: this client begins that run without its old state"),
    "disk": ("cannot write its state", "look at its disk: thinwire aggregator doctor"),
    "closing": ("is closing", "start it again there: thinwire aggregator start"),
    "joins": ("has seen too many joins fail from this address", "wait a minute, and paste the whole invitation"),
    "signatures": ("has seen too many wrong signatures from this address", "wait a minute; who shares the address?"),
    "page": (
        "has its page at this address, not its door",
        "--aggregator with the address of its door: there, thinwire aggregator status says both",
    ),
    "invitation": ("takes no such invitation", "each lets one device in, for a while: ask its operator for another"),
}  # fmt: skip


def meaning(
    refusal: ApiError, url: str, *, tls: bool, fingerprint: str = "", answer: bool = False, within_s: float = 0.0
) -> ThinwireError:
    """Return a refusal as an error of the device; `answer` is True while it pushes a reply.

    `within_s` is the reconnect window in seconds.
    """
    said, hint = ABOUT.get(refusal.kind, ("cannot answer now", "look at its output"))
    what, why = f"the aggregator at {url} {said}", "" if refusal.kind == "closing" else refusal.why
    if refusal.kind in ("pending", "unknown") and fingerprint:
        why = f"{why}; this device's key has the fingerprint {grouped(fingerprint)}"
    passing = refusal.kind in PASSING or refusal.status in {429, 502, 503, 504}
    if refusal.kind == "http" and not passing:
        what, hint = f"{url} is no aggregator's door", "look at the address: --aggregator URL"
    if answer and (refusal.status, refusal.kind) in NEVER_TAKEN:
        return NotTaken(what, why, hint)
    if refusal.kind == "revoked" or not (tls or passing):
        return Refused(what, why, hint)
    return Unreachable(what, why, hint, after_s=refusal.retry_after_s, within_s=within_s)


@contextmanager
def in_words(
    url: str, tls: bool, fingerprint: str, within_s: float, ended: Callable[[], bool], answer: bool
) -> Iterator[None]:
    """Translate refusals and connection errors of this block into Thinwire errors.

    They mean: try again later, drop this reply, or stop the client.
    """
    try:
        yield
    except ApiError as refusal:
        raise meaning(refusal, url, tls=tls, fingerprint=fingerprint, answer=answer, within_s=within_s) from refusal
    except (OSError, http.client.HTTPException) as error:
        if ended():
            raise Unreachable("this link was closed", why=str(error)) from error
        raise silence(error, url, tls=tls, within_s=within_s) from error


def silence(error: Exception, url: str, *, tls: bool, within_s: float = 0.0) -> Unreachable:
    """Return the error if nobody answered, or nobody who is trusted."""
    why = plain(getattr(error, "strerror", None) or str(error) or type(error).__name__)  # the text may quote a stranger
    what = f"cannot reach the aggregator at {url}"
    hint = "start it there (thinwire aggregator start); is the address right, does a firewall let it pass?"
    if isinstance(error, ssl.SSLCertVerificationError):
        what, why = f"the aggregator at {url} shows a certificate that this device does not trust", error.verify_message
        hint = "someone stands in between, or it was set up anew: ask its operator before thinwire client join"
    elif isinstance(error, socket.gaierror):
        hint = "another name or an address that leads there: a device knows its aggregator by the pin"
    elif isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        why = "what answers there does not speak TLS"
        hint = "is the port right? A door on loopback may be http://"
    elif isinstance(error, http.client.BadStatusLine) and not tls:
        hint = "does it speak TLS? https://HOST:PORT"
        if isinstance(error, ConnectionError):
            why, hint = "it hung up without an answer", f"it may just have ended; where it never answers: {hint}"
    return Unreachable(what, why, hint, within_s=within_s)
