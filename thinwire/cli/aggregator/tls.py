"""The certificates of the device API as they were requested on the command line, and the addresses in invitations.

The device API on loopback has no TLS unless a certificate or a name was given. Otherwise it uses a private CA of its
own or the operator's certificate. `tls/invite.json` holds what an invitation names: the pin of the CA and the URLs.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.params import Address

if TYPE_CHECKING:
    from thinwire.transport.server.tls import CertificateProvider

ANY = ("0.0.0.0", "::")
LOCAL = ("localhost", "127.0.0.1", "::1")  # names by which no other machine reaches this one
INVITE = "invite.json"  # read by `thinwire devices invite`: the pin, and the URLs to join at


@dataclass(frozen=True)
class Certificates:
    """The certificate options of `aggregator start`: `--san`, and `--cert --key [--ca]` for the operator's own."""

    names: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def arguments(self) -> list[str]:
        """Return these options as command-line words with absolute paths."""
        given = [("--cert", self.certificate), ("--key", self.key), ("--ca", self.ca)]
        named = [item for name in self.names for item in ("--san", name)]
        return named + [item for option, path in given if path for item in (option, str(path.absolute()))]

    def authority(self, folder: Path, listen: Address) -> CertificateProvider | None:
        """Return the certificate authority of the device API; None if it needs no TLS.

        It needs none on loopback without a certificate or a name. `UsageError` if `--cert`, `--key` and `--ca` do not
        fit together.
        """
        from thinwire.core.errors import UsageError
        from thinwire.transport.server.tls import InternalCA, OperatorCertificate

        if (self.certificate is None) != (self.key is None) or (self.ca and self.certificate is None):
            raise UsageError(
                "--cert and --key belong together, and --ca to both", hint="--cert agg.pem --key agg.key [--ca ca.pem]"
            )
        if self.certificate is not None and self.key is not None:
            return OperatorCertificate(self.certificate, self.key, self.ca)
        if listen.is_loopback and not self.names:
            return None
        if listen.host in ANY or listen.is_loopback or listen.host in self.names:
            return InternalCA(folder, self.names)
        try:
            return InternalCA(folder, [*self.names, listen.host])
        except UsageError:  # the CA is older than this address and cannot sign it; devices check the pin, not the name
            return InternalCA(folder, self.names)

    def reached(self) -> tuple[str, ...]:
        """Return the names for invitations: those of --san, else those of the operator's certificate.

        Devices check the operator's certificate against the name in the URL. Therefore a --san that it lacks is
        refused.
        """
        from thinwire.core.errors import UsageError
        from thinwire.transport.protocol.certificates import Leaf

        if self.certificate is None:
            return self.names
        given = Leaf.of(self.certificate.read_bytes()).names
        if (wrong := [name for name in self.names if name not in given]) and not any("*" in name for name in given):
            raise UsageError(
                f"--san {wrong[0]}: the certificate of --cert is for other names",
                why=", ".join(given) or "it has none",
                hint=f"--san {given[0]}" if given else "a certificate with a subjectAltName",
            )
        return self.names or tuple(name for name in given if "*" not in name and name not in LOCAL)


def own_files(folder: Path) -> list[Path]:
    """Return the files of `--cert`, `--key` and `--ca` of the last start, which stay where the operator keeps them."""
    import click

    from thinwire.cli.local_state import Typed, understood

    typed = Typed.remembered(folder)
    if typed is None:
        return []
    try:
        meant = understood("aggregator", "start", typed.words)
    except click.ClickException:  # the words are of a version with other options
        return []
    return [typed.folder / meant[name] for name in ("cert", "key", "ca") if meant[name]]


def write_invite(folder: Path, authority: CertificateProvider | None, door: str, names: Sequence[str]) -> None:
    """Write the pin and the URLs for invitations; remove the file if the device API has no TLS, where nobody joins."""
    from thinwire.core.statedir import write_atomically

    if authority is None:
        (folder / INVITE).unlink(missing_ok=True)
        return
    said = {"pin": authority.pin, "urls": urls(door, names)}
    write_atomically(folder / INVITE, json.dumps(said).encode())


def repin(folder: Path, pin: str) -> None:
    """Replace the pin in new invitations; the URLs do not change."""
    from thinwire.core.statedir import write_atomically

    path = folder / INVITE
    if path.exists():
        write_atomically(path, json.dumps(json.loads(path.read_bytes()) | {"pin": pin}).encode())


def urls(door: str, names: Sequence[str]) -> list[str]:
    """Return the URLs by which devices reach the address `door`: by its names, else by the addresses of this machine.

    >>> urls("0.0.0.0:9090", ["agg.example"])
    ['https://agg.example:9090']
    """
    host, _, port = door.rpartition(":")
    host = host.strip("[]")
    if named := [name for name in names if not _is_address(name)]:
        return [f"https://{name}:{port}" for name in named]
    hosts = [host] if host not in ANY else [*names, *own_addresses(host)]
    return [f"https://[{one}]:{port}" if ":" in one else f"https://{one}:{port}" for one in dict.fromkeys(hosts)]


def own_addresses(host: str) -> list[str]:
    """Return the addresses from which this machine talks to others, of the families that `host` listens on.

    Without any the host name is returned.
    """
    found = []
    kinds = [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")]  # RFC 5737, RFC 3849
    for family, far in kinds[:1] if host == "0.0.0.0" else kinds:
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            try:
                tried.connect((far, 9))  # no packet is sent
                found.append(str(tried.getsockname()[0]))
            except OSError:
                continue
    return [address for address in found if not ipaddress.ip_address(address).is_loopback] or [socket.gethostname()]


def _is_address(name: str) -> bool:
    """Return True if a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
