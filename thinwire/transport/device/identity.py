"""The identity of a device and of its aggregator: the device's key, the trust anchors, and the aggregator's time.

The key is P-256, or P-384 if the folder has such a key. It is made at the first start, and never leaves its folder.
`Trust` stores the aggregator's address, the CAs that the device trusts, and the device's name there. `ServerClock`
follows the aggregator's clock, because the device's own may be wrong: a Raspberry Pi boots without a clock, and time
servers change it in steps.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from thinwire.core.errors import BadPayload, DataLost, Unreachable
from thinwire.core.statedir import keep_private, write_atomically
from thinwire.transport.protocol.certificates import NO_CHECK_TIME, pin_of, server_name
from thinwire.transport.protocol.http import LATEST
from thinwire.transport.protocol.signing import CURVES

KEY_FILE = "key.pem"


def device_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key in this folder; make one (mode 0600, written completely or not at all) if there is none."""
    path = folder / KEY_FILE
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        write_atomically(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    keep_private(path)
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataLost(
            f"cannot read the key {path}", why=str(error), hint="restore it, or take another --name"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise DataLost(f"{path} is no P-256 or P-384 key", why="only these kinds are used", hint="restore it")
    return key


TRUST_FILE = "aggregator.json"
MAX_CAS = 8
MAX_PEM = 16_384  # characters of one certificate


@dataclass(frozen=True)
class Trust:
    """The trust anchors for one aggregator, its address, and the device's name there.

    `cas` are the trusted CAs as PEM. There are none with `system`: then this machine's own store decides. `server_name`
    is the name that is requested and checked. It is derived from the pin, so that a new address changes nothing, or ""
    for the host of the URL. `name` is the device's row, `spread_s` the last reconnect window of the aggregator.

    Invariant: the CAs are replaced only by CAs that came over a connection which a trusted CA verified.
    """

    url: str
    cas: tuple[str, ...] = ()
    server_name: str = ""
    system: bool = False
    name: str = ""
    spread_s: float = 0.0

    @classmethod
    def load(cls, folder: Path) -> Trust | None:
        """Return what `join` stored in this folder, or None if there is nothing; raise `DataLost` if it is damaged."""
        path = folder / TRUST_FILE
        try:
            raw: Any = json.loads(path.read_bytes())
            trust = cls(
                str(raw["url"]), tuple(str(ca) for ca in raw["cas"]), str(raw["server_name"]),
                raw["system"] is True, str(raw["name"]), float(raw.get("spread_s", 0.0)),
            )  # fmt: skip
            if not trust.system:
                readable(trust.cas)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, BadPayload) as error:
            raise DataLost(
                f"cannot read {path}", why=str(error), hint="restore it, or join again: thinwire client join URL -"
            ) from error
        return trust

    def save(self, folder: Path) -> None:
        """Write the file completely or not at all, readable by this user alone."""
        write_atomically(folder / TRUST_FILE, json.dumps(asdict(self), indent=1).encode(), mode=0o600)

    @property
    def pins(self) -> tuple[str, ...]:
        """Return the pins of the CAs."""
        return tuple(_pin(ca) for ca in self.cas)

    def names(self, host: str) -> tuple[str, ...]:
        """Return the server names to try, one for each CA: during a rotation the aggregator answers to both."""
        return tuple(server_name(pin) for pin in self.pins) if self.server_name else (host,)

    def context(self) -> ssl.SSLContext:
        """Return a TLS context (1.2 or later, strict) that trusts these CAs alone."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        if self.system:
            made.load_default_certs(ssl.Purpose.SERVER_AUTH)
        else:
            made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
            made.load_verify_locations(cadata=b"".join(_certificate(ca).public_bytes(Encoding.DER) for ca in self.cas))
        return made

    def renewed(self, cas: tuple[str, ...]) -> Trust:
        """Return the trust with the CAs that the aggregator named over a verified connection.

        It is unchanged if the aggregator named none, or an unreadable one. The aggregator then sees that this device
        does not trust its new CA.
        """
        if self.system or not cas or len(cas) > MAX_CAS:
            return self
        try:
            first = readable(cas)[0]
        except BadPayload:
            return self
        return replace(self, cas=cas, server_name=server_name(first) if self.server_name else "")


def _pin(pem: str) -> str:
    return pin_of(_certificate(pem))


def _certificate(pem: str) -> x509.Certificate:
    """Return the first certificate of a text, the one that is pinned and trusted.

    A text may contain several, and OpenSSL would trust them all.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        certificate.public_key()
        return certificate
    except Exception as error:  # cryptography raises many kinds, and the text may be a stranger's
        raise BadPayload("this is no certificate", why=str(error)) from error


def readable(cas: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pins of certificates; raise `BadPayload` if there are none or one is unreadable."""
    if not cas or any(len(ca) > MAX_PEM for ca in cas):
        raise BadPayload("no certificates that can be held")
    return tuple(_pin(ca) for ca in cas)


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has no other


def since_boot() -> float:
    """Return the seconds since boot."""
    return time.clock_gettime(_BOOT)


class ServerClock:
    """The aggregator's clock, or this machine's clock before the aggregator's time is known. Any thread may call it.

    The time is stored as an offset to the time since boot, which nobody sets and which runs on in suspend. `doubted` is
    True while a learned time is discarded and no new one is known.

    >>> clock = ServerClock(wall=lambda: 0.0, boot=lambda: 30.0)   # 1970, half a minute after the start
    >>> clock.learn(1_800_000_000.0); clock.now().year, clock.skew_s
    (2027, 1800000000.0)
    """

    def __init__(self, wall: Callable[[], float] = time.time, boot: Callable[[], float] = since_boot) -> None:
        self._wall, self._boot = wall, boot
        self._offset: float | None = None
        self.doubted = False
        self._lock = threading.Lock()

    def wall(self) -> float:
        """Return the wall-clock seconds."""
        with self._lock:
            return self._wall() if self._offset is None else self._boot() + self._offset

    def now(self) -> datetime:
        """Return the time for a signature, within the years that a timestamp can have."""
        return datetime.fromtimestamp(min(max(self.wall(), 0.0), LATEST), UTC)

    def learn(self, now: float) -> None:
        """Set the clock: the aggregator's clock showed `now` a moment ago.

        An error of half a round trip is within the aggregator's tolerance.
        """
        with self._lock:
            self._offset, self.doubted = now - self._boot(), False

    @property
    def known(self) -> bool:
        """Return True if the aggregator's time is known."""
        with self._lock:
            return self._offset is not None

    @property
    def skew_s(self) -> float:
        """Return the seconds by which this machine's clock is behind the aggregator's, 0 while that is unknown."""
        return self.wall() - self._wall() if self.known else 0.0

    def require_valid(self, not_before: float, not_after: float, url: str) -> None:
        """Raise `Unreachable` for a certificate that is not valid now; TLS did not check it, without a clock to trust.

        The learned time is then discarded, because it may be the wrong one. The next registration learns it again.
        """
        if not self.known:
            return
        now = self.wall()
        if not_before <= now <= not_after:
            return
        with self._lock:
            self._offset, self.doubted = None, True
        past = now > not_after
        when = datetime.fromtimestamp(not_after if past else not_before, UTC).strftime("%Y-%m-%d %H:%M")
        raise Unreachable(
            f"the certificate of the aggregator at {url} is not valid now",
            why=f"it {'ended' if past else 'begins'} on {when} UTC",
            hint="on its machine: thinwire aggregator doctor",
        )
