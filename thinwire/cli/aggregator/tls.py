"""The certificates of the device API, the addresses in invitations, and `thinwire aggregator ca`.

The device API on loopback has no TLS unless a certificate or a name was given. Otherwise it uses a private CA of its
own or the operator's certificate. `tls/invite.json` holds what an invitation names: the pin of the CA and the URLs.
`ca show` and `ca rotate` show the CA that devices pin, and replace it without a visit to any device.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Address, Home, Json
from thinwire.core.invitation import INVITE
from thinwire.core.net import is_ip_address, is_loopback

if TYPE_CHECKING:
    from thinwire.transport.protocol.certificates import Chain
    from thinwire.transport.server.tls import CertificateProvider

ANY = ("0.0.0.0", "::")
LOCAL = ("localhost", "127.0.0.1", "::1")  # names by which no other machine reaches this one


@dataclass(frozen=True)
class Certificates:
    """The certificate options of `aggregator start`: `--san`, and `--cert --key [--ca]` for the operator's own."""

    names: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

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
    from thinwire.core.start_options import StartOptions

    last = StartOptions.load(folder)
    return [path for name in ("cert", "key", "ca") if last and (path := last.path(name))]


def write_invite(folder: Path, authority: CertificateProvider | None, address: str, names: Sequence[str]) -> None:
    """Write the pin and the URLs for invitations; remove the file if the device API has no TLS, where nobody joins."""
    from thinwire.core.statedir import write_atomically

    if authority is None:
        (folder / INVITE).unlink(missing_ok=True)
        return
    said = {"pin": authority.pin, "urls": urls(address, names)}
    write_atomically(folder / INVITE, json.dumps(said).encode())


def repin(folder: Path, pin: str) -> None:
    """Replace the pin in new invitations; the URLs do not change."""
    from thinwire.core.statedir import write_atomically

    path = folder / INVITE
    if path.exists():
        write_atomically(path, json.dumps(json.loads(path.read_bytes()) | {"pin": pin}).encode())


def urls(address: str, names: Sequence[str]) -> list[str]:
    """Return the URLs by which devices reach the address `address`: by its names, else by the addresses of this
    machine.

    >>> urls("0.0.0.0:9090", ["agg.example"])
    ['https://agg.example:9090']
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if named := [name for name in names if not is_ip_address(name)]:
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
    return [address for address in found if not is_loopback(address)] or [socket.gethostname()]


app = typer.Typer(name="ca", help="The CA that devices pin.", no_args_is_help=True)


@app.command()
def show(json: Json = False, home: Home = None) -> None:
    """Show the pin, the names and the dates of the certificates; two CAs while one replaces the other."""
    rows = _rows(_folder(home), home)
    if json:
        console.document([_document(row) for row in rows])
        return
    for row, standing in zip(rows, ("newest", *["until every device holds the newest"] * len(rows)), strict=False):
        console.line(f"pin      {row.pin}" + (f"  ({standing})" if len(rows) > 1 else ""))
        console.line(f"ca       until {row.ca_ends:%Y-%m-%d}")
        console.line(f"leaf     until {row.leaf.ends:%Y-%m-%d}, renewed from {row.leaf.renewed_at:%Y-%m-%d} on")
        console.line(f"names    {', '.join(row.leaf.names)}")


@app.command()
def rotate(
    san: Annotated[
        list[str] | None, typer.Option("--san", metavar="NAME", help="further name or address for the certificate")
    ] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Make a new CA beside the present one; both are served until every device holds the new one.

    Devices take it over by themselves, over a connection that the present one vouches for.

    Open invitations that name the present one go on working meanwhile.
    """
    from thinwire.cli.local_state import alive, command_line
    from thinwire.transport.server.tls import InternalCA

    folder = _folder(home)
    _rows(folder, home)
    pin = InternalCA(folder).rotate(san or ())
    repin(folder, pin)
    if json:
        console.document([_document(row) for row in _rows(folder, home)])
        return
    console.line(f"pin      {pin}")
    console.line(
        "new invitations name it; " + ("it is shown within a minute" if alive(home) else "nobody serves it now")
    )
    console.line(
        f"look     {command_line('aggregator ca show', home)}: one CA is left when every device holds this one"
    )


def _folder(home: Path | None) -> Path:
    """Return the folder of the certificates."""
    from thinwire.core.statedir import find_home

    return find_home(home) / "aggregator" / "tls"


def _rows(folder: Path, home: Path | None) -> list[Chain]:
    """Return the served chains, newest CA first; `NotFound` if the aggregator has no CA of its own."""
    from thinwire.core.errors import NotFound
    from thinwire.core.start_options import reachable_command
    from thinwire.transport.protocol.certificates import chains

    if rows := list(chains(folder)):
        return rows
    why, hint = "its device API has been on this machine only", reachable_command(folder.parent)
    if brought := own_files(folder.parent):
        why = "its device API shows a certificate that you brought"
        hint = shlex.join(["openssl", "x509", "-noout", "-text", "-in", str(brought[0])])
    raise NotFound("this aggregator has no CA of its own", why=why, hint=hint)


def _document(row: Chain) -> dict[str, Any]:
    """Return one chain for `--json`."""
    return {
        "pin": row.pin,
        "names": list(row.leaf.names),
        "ca_until": row.ca_ends.isoformat(),
        "leaf_until": row.leaf.ends.isoformat(),
        "renewed_at": row.leaf.renewed_at.isoformat(),
    }
