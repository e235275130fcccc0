"""The TLS certificates of the device API, and how they are replaced.

`InternalCA` is the aggregator's own CA, which devices pin. `OperatorCertificate` is a certificate that the operator
brought.

The folder of a private CA has for each CA `PIN.ca.pem`, `PIN.ca.key`, `PIN.pem` and `PIN.key`, all with mode 0600. PIN
is cut to 16 digits. `state.json` stores which CA is the latest, which are still served, and the names beyond the local
ones.

A device names the CA that it trusts by the server name that it requests. During a rotation each device thus gets the
chain that it can verify.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from cryptography import x509

from thinwire.core.errors import DataLost, UsageError
from thinwire.core.fleet import Roster
from thinwire.core.invitation import SYSTEM
from thinwire.core.net import is_ip_address
from thinwire.core.statedir import keep_private, private_folder, write_atomically
from thinwire.transport.protocol.certificates import (
    STATE,
    CertificateAndKey,
    due,
    make_ca,
    make_leaf,
    permits,
    pin_of,
    server_context,
    server_name,
)

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


class CertificateProvider(Protocol):
    """The provider of the API's certificate. Any thread may call it."""

    @property
    def context(self) -> ssl.SSLContext:
        """Return the live TLS context: a renewal changes it without closing a connection."""

    @property
    def pin(self) -> str:
        """Return the pin for invitations: 64 hex digits, or `system`."""

    def cas(self) -> tuple[str, ...]:
        """Return the CA certificates as PEM, the latest first."""

    def server_name(self) -> str:
        """Return the server name for which the leaf is issued, "" for the host of the URL."""

    def renew(self) -> bool:
        """Renew what is due; return True if the CAs changed."""

    def confirmed(self, trusted_pins: Sequence[Sequence[str]]) -> None:
        """Retire old CAs; `trusted_pins` are the pins that each device trusts."""


class TrustedCas:
    """The CAs that devices trust, and which of them each device knows by now: it reports that when it registers.

    Without an `authority` there are none: the device API has no TLS, and is for this machine alone.
    """

    def __init__(self, authority: CertificateProvider | None, roster: Roster) -> None:
        self._authority, self._roster = authority, roster
        self._pins: dict[str, tuple[str, ...]] = {}  # by device, from hellos since the start

    def certificates(self) -> tuple[str, ...]:
        """Return the CA certificates as PEM, the latest first."""
        return self._authority.cas() if self._authority else ()

    def reported(self, device: str, pins: tuple[str, ...]) -> None:
        """Note the pins that a device trusts."""
        self._pins[device] = pins

    def renew(self) -> bool:
        """Renew the certificate, and retire CAs that no device needs any more; return True if the CAs changed."""
        if self._authority is None:
            return False
        changed = self._authority.renew()
        rows = [one for one in self._roster.rows() if one.state == "approved" and one.how != "stock" and one.is_intact]
        self._authority.confirmed([self._pins.get(row.name, ()) for row in rows if row.how != "loopback"])
        return changed


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class State:
    """The content of `state.json`.

    `pins` are the CAs that are served, the latest first. `names` are the values of --san.
    """

    pins: tuple[str, ...]
    names: tuple[str, ...]


class InternalCA:
    """The aggregator's own CA, made at the first start, with one leaf for each CA that is served."""

    def __init__(self, folder: Path, names: Sequence[str] = (), now: Callable[[], datetime] = _utc) -> None:
        self.folder, self._now = private_folder(folder), now
        self._lock = threading.Lock()
        self._contexts: dict[str, ssl.SSLContext] = {}  # by the requested server name
        self._loaded: dict[str, bytes] = {}  # the leaf that each context presents
        self._state = self._read() or self._found(names)
        self._add(names)
        self.context = server_context()
        self.context.sni_callback = self._choose
        self.renew()

    @property
    def pin(self) -> str:
        """Return the pin of the latest CA."""
        return self._state.pins[0]

    @property
    def names(self) -> list[str]:
        """Return the names for the leaf, without its server name."""
        return [*self._state.names, *_own_names()]

    def cas(self) -> tuple[str, ...]:
        """Return the CA certificates as PEM, the latest first."""
        return self._pems

    def server_name(self) -> str:
        """Return the server name that is derived from the latest pin."""
        return server_name(self.pin)

    def renew(self) -> bool:
        """Renew leaves that are due, and adopt the rotation of another process; return True if the CAs changed."""
        with self._lock:
            before, self._state = self._state.pins, self._read() or self._state
            for pin in self._state.pins:
                self._show(pin)
            self._pems = tuple(self._ca(pin).certificate.decode() for pin in self._state.pins)
            certificate, key = self._files(self._state.pins[0], "leaf")
            if self._loaded.get("") != self._loaded[self._state.pins[0]]:
                self.context.load_cert_chain(certificate, key)  # for clients without a server name
                self._loaded[""] = self._loaded[self._state.pins[0]]
            self._first = self._contexts[server_name(self._state.pins[0])]
            return before != self._state.pins

    def rotate(self, names: Sequence[str] = ()) -> str:
        """Make a new CA beside the present one, and return its pin.

        Both are served until every device trusts the new one.
        """
        with self._lock:
            kept = tuple(dict.fromkeys([*self._state.names, *names]))
            pin = self._make(kept)
            self._write(State((pin, *self._state.pins), kept))
        self.renew()
        return pin

    def confirmed(self, trusted_pins: Sequence[Sequence[str]]) -> None:
        """Stop serving older CAs once every device trusts the latest one."""
        with self._lock:
            if len(self._state.pins) > 1 and trusted_pins and all(self.pin in pins for pins in trusted_pins):
                self._write(State(self._state.pins[:1], self._state.names))
                self._pems = self._pems[:1]

    def issue(self, certificate: Path, key: Path, names: Sequence[str]) -> None:
        """Write a leaf of the latest CA that no device takes for the device API, unless the one there is not due.

        Raise `UsageError` if the CA may not certify one of the names.
        """
        ca = self._ca(self.pin)
        self._add(names)
        present = _issued(certificate, key) if certificate.exists() and key.exists() else None
        if present is None or due(present, names, ca, self._now()):
            made = make_leaf(ca, names, self._now(), for_devices=False)
            write_atomically(key, made.key)
            write_atomically(certificate, made.certificate)

    def _found(self, names: Sequence[str]) -> State:
        """Make the first CA, for the given names and those of this machine."""
        self._state = State((), tuple(dict.fromkeys(names)))
        pin = self._make(self._state.names)
        self._write(State((pin,), self._state.names))
        return self._state

    def _make(self, names: Sequence[str]) -> str:
        made = make_ca([*names, *_own_names()], self._now())
        pin = pin_of(made.parsed)
        certificate, key = self._files(pin, "ca")
        write_atomically(key, made.key)
        write_atomically(certificate, made.certificate)
        return pin

    def _add(self, names: Sequence[str]) -> None:
        """Add names of a later start; raise `UsageError` if the CA may not certify one of them."""
        if wrong := [name for name in names if not _is_name(name)]:
            raise UsageError(f"--san {wrong[0]!r} is no name or address", hint="--san agg.example")
        if missing := [name for name in names if not permits(self._ca(self.pin), name)]:
            raise UsageError(
                f"--san {missing[0]}: this aggregator's CA was made for other names",
                why="it may name nothing that was not said when it was made, so that nobody can misuse it",
                hint=f"thinwire aggregator ca rotate --san {missing[0]}; devices that have joined need no name at all",
            )
        if new := [name for name in names if name not in self._state.names]:
            self._write(State(self._state.pins, (*self._state.names, *new)))

    def _show(self, pin: str) -> None:
        """Load this CA's leaf into its live context; issue the leaf again if that is due."""
        ca, (certificate, key) = self._ca(pin), self._files(pin, "leaf")
        present = _issued(certificate, key) if certificate.exists() and key.exists() else None
        if present is None or due(present, self.names, ca, self._now()):
            present = make_leaf(ca, self.names, self._now())
            write_atomically(key, present.key)
            write_atomically(certificate, present.certificate)
        context = self._contexts.setdefault(server_name(pin), server_context())
        if self._loaded.get(pin) != present.certificate:
            context.load_cert_chain(certificate, key)
            self._loaded[pin] = present.certificate

    def _choose(self, connection: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._contexts.get(name or "", self._first)

    def _ca(self, pin: str) -> CertificateAndKey:
        return _issued(*self._files(pin, "ca"))

    def _files(self, pin: str, which: str) -> tuple[Path, Path]:
        stem = pin[:16] + (".ca" if which == "ca" else "")
        return self.folder / f"{stem}.pem", self.folder / f"{stem}.key"

    def _read(self) -> State | None:
        path = self.folder / STATE
        if not path.exists():
            return None
        try:
            said = json.loads(path.read_bytes())
            return State(tuple(said["pins"]), tuple(said["names"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _lost(path, error) from error

    def _write(self, state: State) -> None:
        data = json.dumps({"pins": state.pins, "names": state.names}).encode()
        write_atomically(self.folder / STATE, data)
        self._state = state


def _issued(certificate: Path, key: Path) -> CertificateAndKey:
    try:
        keep_private(key)
        found = CertificateAndKey(certificate.read_bytes(), key.read_bytes())
        found.require_readable()
        return found
    except (OSError, ValueError) as error:
        raise _lost(certificate, error) from error


def _lost(path: Path, error: Exception) -> DataLost:
    return DataLost(
        f"cannot read {path}",
        why=str(error),
        hint="restore it: thinwire aggregator restore; without it every device would have to join again",
    )


def _own_names() -> list[str]:
    """Return this machine's host name. Names that other machines use come from --san."""
    return [name for name in [socket.gethostname()] if _is_name(name)]


def _is_name(name: str) -> bool:
    """Return True if a certificate can contain it: an address, or a name of letters, digits, hyphens and dots."""
    return is_ip_address(name) or _NAME.fullmatch(name) is not None


class OperatorCertificate:
    """A certificate that the operator brought. It is loaded again when its files are replaced, and never issued here.

    `ca` is the file of its CA, to be pinned. Without `ca`, devices use the CAs of their system.
    """

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
            raise UsageError(f"--ca {ca} is not readable", why=why, hint="a PEM file, readable by this user") from error
        except ValueError as error:
            why = "it is no certificate in PEM"
            raise UsageError(f"--ca {ca} is not usable", why=why, hint="a file with BEGIN CERTIFICATE") from error

    @property
    def pin(self) -> str:
        """Return the CA's pin, or `system`."""
        return self._pin

    def cas(self) -> tuple[str, ...]:
        """Return the CA's PEM, or nothing with the system's CAs."""
        return self._pems

    def server_name(self) -> str:
        """Return "", because the certificate is issued for the host of the URL."""
        return ""

    def renew(self) -> bool:
        """Load the files again if they were replaced, and return False.

        Unusable files raise `UsageError` at the start; later the loaded certificate stays in use.
        """
        try:
            seen = tuple(path.stat().st_mtime_ns for path in (self._certificate, self._key))
            if seen != self._seen:
                self.context.load_cert_chain(self._certificate, self._key, _no_password)
                self._seen = seen
        except OSError as error:  # ssl.SSLError is one too
            if self._seen:
                return False  # the loaded certificate stays in use
            raise UsageError(
                f"--cert {self._certificate} and --key {self._key} is not usable",
                why=_why(error),
                hint="two PEM files that belong together, readable by this user, the key without a password",
            ) from error
        return False

    def confirmed(self, trusted_pins: Sequence[Sequence[str]]) -> None:
        """Do nothing: the operator replaces the CA."""


def _no_password() -> str:
    """Raise, because a service has no user who could type one; OpenSSL would prompt on the terminal."""
    raise _Encrypted


class _Encrypted(ssl.SSLError):
    pass


def _why(error: OSError) -> str:
    if isinstance(error, _Encrypted):
        return "the key is encrypted with a password, and nobody types it for a service"
    if isinstance(error, ssl.SSLError):
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        return "the key is not that of the certificate" if mismatch else "one of them is no such PEM file"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
