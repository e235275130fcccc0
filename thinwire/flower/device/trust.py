"""What a device holds about its aggregator: its address, the CAs that it believes, and the name that it goes by there.

Law: the CAs that are held are replaced only by what came over a connection that one of them vouched for.
"""

from __future__ import annotations

import json
import ssl
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.home import write_atomically
from thinwire.flower.wire.certificates import NO_CHECK_TIME, pin_of, server_name

TRUST_FILE = "aggregator.json"
MAX_CAS = 8
MAX_PEM = 16_384  # letters of one certificate


@dataclass(frozen=True)
class Trust:
    """`cas` are the PEMs that are held, none with `system`: then this machine's own store decides.

    `server_name` is the name that is asked for and checked: derived from the pin, so that a new address breaks nothing,
    or "" for the host of the URL. `name` is the row's, `spread_s` the last that the aggregator gave.
    """

    url: str
    cas: tuple[str, ...] = ()
    server_name: str = ""
    system: bool = False
    name: str = ""
    spread_s: float = 0.0

    @classmethod
    def load(cls, folder: Path) -> Trust | None:
        """What `join` left here; None where nothing is."""
        path = folder / TRUST_FILE
        try:
            raw: Any = json.loads(path.read_bytes())
            found = cls(
                str(raw["url"]), tuple(str(ca) for ca in raw["cas"]), str(raw["server_name"]),
                raw["system"] is True, str(raw["name"]), float(raw.get("spread_s", 0.0)),
            )  # fmt: skip
            if not found.system:
                readable(found.cas)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, BadPayload) as error:
            raise DataLost(
                f"cannot read {path}", why=str(error), hint="restore it, or join anew: thinwire client join URL -"
            ) from error
        return found

    def save(self, folder: Path) -> None:
        """Written whole or not at all, for this user alone."""
        write_atomically(folder / TRUST_FILE, json.dumps(asdict(self), indent=1).encode(), mode=0o600)

    @property
    def pins(self) -> tuple[str, ...]:
        return tuple(_pin(ca) for ca in self.cas)

    def names(self, host: str) -> tuple[str, ...]:
        """The names to try, one for each CA that is held: while CAs are rotated a door answers to both."""
        return tuple(server_name(pin) for pin in self.pins) if self.server_name else (host,)

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or later, strict, and nobody believed but the CAs that are held."""
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
        """With the CAs that the aggregator names, over a connection that a held one vouched for.

        Nothing changes where it names none, or one that cannot be read: then it will see that we do not hold it.
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
    """The one that is pinned and believed, and no other: a text may hold several, and OpenSSL would take them all."""
    try:
        found = x509.load_pem_x509_certificate(pem.encode())
        found.public_key()
        return found
    except Exception as error:  # cryptography raises many kinds, and the text may be a stranger's
        raise BadPayload("this is no certificate", why=str(error)) from error


def readable(cas: tuple[str, ...]) -> tuple[str, ...]:
    """Their pins; `BadPayload` where there are none, or one cannot be read."""
    if not cas or any(len(ca) > MAX_PEM for ca in cas):
        raise BadPayload("no certificates that can be held")
    return tuple(_pin(ca) for ca in cas)
