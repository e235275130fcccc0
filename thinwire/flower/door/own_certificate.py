"""A door with the operator's own certificate: loaded again when its files are replaced, never made by us."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from thinwire.core.errors import UsageError
from thinwire.flower.wire.certificates import pin_of, server_context
from thinwire.flower.wire.invitation import SYSTEM


class GivenAuthority:
    """A certificate that the operator brought. `ca`: its CA's file, to be pinned; without one, the system's CAs."""

    def __init__(self, certificate: Path, key: Path, ca: Path | None = None) -> None:
        self._certificate, self._key, self._ca = certificate, key, ca
        self.context = server_context()
        self._seen: tuple[int, ...] = ()
        self.renew()
        try:
            self._pems = (ca.read_text(),) if ca else ()
            self._pin = pin_of(x509.load_pem_x509_certificate(ca.read_bytes())) if ca else SYSTEM
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError(f"--ca {ca} cannot be read", why=why, hint="a PEM file, readable by this user") from error
        except ValueError as error:
            why = "it is no certificate in PEM"
            raise UsageError(f"--ca {ca} cannot be used", why=why, hint="a file with BEGIN CERTIFICATE") from error

    @property
    def pin(self) -> str:
        return self._pin

    def cas(self) -> tuple[str, ...]:
        return self._pems

    def server_name(self) -> str:
        return ""

    def renew(self) -> bool:
        """Load the files again when they were replaced."""
        try:
            seen = tuple(path.stat().st_mtime_ns for path in (self._certificate, self._key))
            if seen != self._seen:
                self.context.load_cert_chain(self._certificate, self._key, _no_password)
                self._seen = seen
        except OSError as error:  # ssl.SSLError is one too
            if self._seen:
                return False  # the one that was loaded goes on
            raise UsageError(
                f"--cert {self._certificate} and --key {self._key} cannot be used",
                why=_why(error),
                hint="two PEM files that belong together, readable by this user, the key without a password",
            ) from error
        return False

    def confirmed(self, holds: Sequence[Sequence[str]]) -> None:
        """Nothing: the operator's CA is the operator's to replace."""


def _no_password() -> str:
    """A service has nobody to ask: OpenSSL would prompt on the terminal."""
    raise _Encrypted


class _Encrypted(ssl.SSLError):
    pass


def _why(error: OSError) -> str:
    if isinstance(error, _Encrypted):
        return "the key is encrypted with a password, and a service has nobody to ask for it"
    if isinstance(error, ssl.SSLError):
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        return "the key is not that of the certificate" if mismatch else "one of them is no such PEM file"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
