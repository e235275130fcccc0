"""Who the door is to its devices: the CA that they pin, the leaf that it shows, and how both are replaced.

`FOLDER/` holds for each CA `PIN.ca.pem`, `PIN.ca.key`, `PIN.pem`, `PIN.key` (all 0600; PIN is cut to 16 digits), and
`state.json`: which CA is the newest, which are still served, and the names beyond the local ones. A device names the CA
that it holds by the server name that it asks for, so during a rotation each is shown the chain that it can verify.
"""

from __future__ import annotations

import ipaddress
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
from thinwire.core.statedir import keep_private, private_folder, write_atomically
from thinwire.transport.protocol.certificates import (
    STATE,
    Issued,
    due,
    make_ca,
    make_leaf,
    permits,
    pin_of,
    server_context,
    server_name,
)
from thinwire.transport.protocol.registration import SYSTEM

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


class Authority(Protocol):
    """What the door needs of whoever stands for it. Any thread may call it."""

    @property
    def context(self) -> ssl.SSLContext: ...  # live: a renewal reaches it without closing a connection
    @property
    def pin(self) -> str: ...  # of invitations: 64 hex digits, or `system`
    def cas(self) -> tuple[str, ...]: ...  # PEM, the newest first
    def server_name(self) -> str: ...  # that the leaf is asked by; "": the URL's host
    def renew(self) -> bool: ...  # what is due; True when the CAs changed
    def confirmed(self, holds: Sequence[Sequence[str]]) -> None: ...  # the pins that each device holds


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class State:
    """`pins`: the CAs that are served, the newest first; `names`: what --san named."""

    pins: tuple[str, ...]
    names: tuple[str, ...]


class PrivateAuthority:
    """A CA of our own, made at the first start."""

    def __init__(self, folder: Path, names: Sequence[str] = (), now: Callable[[], datetime] = _utc) -> None:
        self.folder, self._now = private_folder(folder), now
        self._lock = threading.Lock()
        self._contexts: dict[str, ssl.SSLContext] = {}  # by server name
        self._loaded: dict[str, bytes] = {}  # the leaf that each context shows
        self._state = self._read() or self._found(names)
        self._add(names)
        self.context = server_context()
        self.context.sni_callback = self._choose
        self.renew()

    @property
    def pin(self) -> str:
        return self._state.pins[0]

    @property
    def pins(self) -> tuple[str, ...]:
        return self._state.pins

    @property
    def names(self) -> list[str]:
        """All that the leaf is to carry, but for the server name."""
        return [*self._state.names, *_own_names()]

    def cas(self) -> tuple[str, ...]:
        return self._pems

    def server_name(self) -> str:
        return server_name(self.pin)

    def leaf(self, pin: str = "") -> x509.Certificate:
        """The certificate that is shown to who holds this CA."""
        return x509.load_pem_x509_certificate(self._loaded[pin or self.pin])

    def renew(self) -> bool:
        """Make leaves anew that are due, and take up what another process has rotated."""
        with self._lock:
            before, self._state = self._state.pins, self._read() or self._state
            for pin in self._state.pins:
                self._show(pin)
            self._pems = tuple(self._ca(pin).certificate.decode() for pin in self._state.pins)
            certificate, key = self._files(self._state.pins[0], "leaf")
            if self._loaded.get("") != self._loaded[self._state.pins[0]]:
                self.context.load_cert_chain(certificate, key)  # for who names no server
                self._loaded[""] = self._loaded[self._state.pins[0]]
            self._first = self._contexts[server_name(self._state.pins[0])]
            return before != self._state.pins

    def rotate(self, names: Sequence[str] = ()) -> str:
        """A new CA beside the present one; gives its pin. Both are served until every device holds the new one."""
        with self._lock:
            kept = tuple(dict.fromkeys([*self._state.names, *names]))
            pin = self._make(kept)
            self._write(State((pin, *self._state.pins), kept))
        self.renew()
        return pin

    def confirmed(self, holds: Sequence[Sequence[str]]) -> None:
        """Stop serving the CAs before the newest once each device (its pins) holds that one."""
        with self._lock:
            if len(self._state.pins) > 1 and holds and all(self.pin in pins for pins in holds):
                self._write(State(self._state.pins[:1], self._state.names))
                self._pems = self._pems[:1]

    def _found(self, names: Sequence[str]) -> State:
        """The first start: a CA for the names that are given and for those of this machine."""
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
        """Names that come with a later start; a CA that may not name them is refused in words."""
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
        """Load this CA's leaf into its live context, made anew when it is due."""
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

    def _ca(self, pin: str) -> Issued:
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


def _issued(certificate: Path, key: Path) -> Issued:
    try:
        keep_private(key)
        found = Issued(certificate.read_bytes(), key.read_bytes())
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
    """What this machine calls itself. Nobody is asked for a longer name: --san gives those that others know."""
    return [name for name in [socket.gethostname()] if _is_name(name)]


def _is_name(name: str) -> bool:
    """Whether a certificate can hold it: an address, or a name of letters, digits, hyphens and dots."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return _NAME.fullmatch(name) is not None
    return True


# A door with the operator's own certificate: loaded again when its files are replaced, never made by us.


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
