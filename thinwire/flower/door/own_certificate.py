"""A door with the operator's own certificate: loaded again when its files are replaced, never made by us."""

from __future__ import annotations

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
        self._pems = (ca.read_text(),) if ca else ()
        try:
            self._pin = pin_of(x509.load_pem_x509_certificate(ca.read_bytes())) if ca else SYSTEM
        except ValueError as error:
            raise UsageError(f"--ca {ca} holds no certificate", why=str(error), hint="a PEM file") from error

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
                self.context.load_cert_chain(self._certificate, self._key)
                self._seen = seen
        except OSError as error:  # ssl.SSLError is one too
            if self._seen:
                return False  # the one that was loaded goes on
            raise UsageError(
                f"--cert {self._certificate} and --key {self._key} cannot be used",
                why=str(error),
                hint="two PEM files that belong together, readable by this user",
            ) from error
        return False

    def confirmed(self, holds: Sequence[Sequence[str]]) -> None:
        """Nothing: the operator's CA is the operator's to replace."""
