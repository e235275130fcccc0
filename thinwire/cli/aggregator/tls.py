"""Who the door stands for, as it was asked for on the command line; and where invitations say that it is."""

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
    from thinwire.transport.server.tls import Authority

ANY = ("0.0.0.0", "::")
LOCAL = ("localhost", "127.0.0.1", "::1")  # no device elsewhere gets here by these
INVITE = "invite.json"  # what `thinwire devices invite` reads: the pin, and the addresses to join at


@dataclass(frozen=True)
class Certificates:
    """`--san`, and `--cert --key [--ca]` for the operator's own certificate."""

    names: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def arguments(self) -> list[str]:
        given = [("--cert", self.certificate), ("--key", self.key), ("--ca", self.ca)]
        named = [item for name in self.names for item in ("--san", name)]
        return named + [item for option, path in given if path for item in (option, str(path.absolute()))]

    def authority(self, folder: Path, listen: Address) -> Authority | None:
        """None for a plain door, which is on loopback and was given no certificate or name."""
        from thinwire.core.errors import UsageError
        from thinwire.transport.server.tls import GivenAuthority, PrivateAuthority

        if (self.certificate is None) != (self.key is None) or (self.ca and self.certificate is None):
            raise UsageError(
                "--cert and --key belong together, and --ca to both", hint="--cert agg.pem --key agg.key [--ca ca.pem]"
            )
        if self.certificate is not None and self.key is not None:
            return GivenAuthority(self.certificate, self.key, self.ca)
        if listen.is_loopback and not self.names:
            return None
        if listen.host in ANY or listen.is_loopback or listen.host in self.names:
            return PrivateAuthority(folder, self.names)
        try:
            return PrivateAuthority(folder, [*self.names, listen.host])
        except UsageError:  # the CA is older than this address; devices know the door by its pin, and nobody asked more
            return PrivateAuthority(folder, self.names)

    def reached(self) -> tuple[str, ...]:
        """The names that invitations give: those of --san, else what one's own certificate is for.

        Devices check one's own certificate under the name in the URL, so a --san that it lacks is refused.
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
    """The files of `--cert`, `--key` and `--ca` of the last start here: they lie where the operator keeps them."""
    import click

    from thinwire.cli.local_state import Typed, understood

    typed = Typed.remembered(folder)
    if typed is None:
        return []
    try:
        meant = understood("aggregator", "start", typed.words)
    except click.ClickException:  # words of a version that had other options
        return []
    return [typed.folder / meant[name] for name in ("cert", "key", "ca") if meant[name]]


def write_invite(folder: Path, authority: Authority | None, door: str, names: Sequence[str]) -> None:
    """Leave the pin and the addresses for who writes invitations; nothing for a plain door, where nobody joins."""
    from thinwire.core.statedir import write_atomically

    if authority is None:
        (folder / INVITE).unlink(missing_ok=True)
        return
    said = {"pin": authority.pin, "urls": urls(door, names)}
    write_atomically(folder / INVITE, json.dumps(said).encode())


def repin(folder: Path, pin: str) -> None:
    """Let new invitations name the CA of this pin; where the door is does not change."""
    from thinwire.core.statedir import write_atomically

    path = folder / INVITE
    if path.exists():
        write_atomically(path, json.dumps(json.loads(path.read_bytes()) | {"pin": pin}).encode())


def urls(door: str, names: Sequence[str]) -> list[str]:
    """Where devices can reach a door: by the names it was given, else by the addresses of this machine.

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
    """The addresses that this machine would talk to others from, of the kinds that `host` listens on; else its name."""
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
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
