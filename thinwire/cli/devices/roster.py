"""The commands of `thinwire devices roster`: make the offline key, export devices, sign, verify, and install them.

`key` and `sign` belong on a machine that is not the aggregator's: who has the key decides who takes part.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, read_file

if TYPE_CHECKING:
    from thinwire.core.errors import ThinwireError

app = typer.Typer(name="roster", help="Rosters: devices that an offline key has approved.", no_args_is_help=True)

Out: TypeAlias = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="file to write; default: stdout")]
LARGEST_KEY = 1 << 16  # bytes
MAKE = "thinwire devices roster key KEY.pem, or openssl genpkey -algorithm ed25519 -out KEY.pem"


@app.command()
def key(
    file: Annotated[
        Path, typer.Argument(metavar="KEY.pem", help="private key to write; KEY.pem.pub is its public key")
    ],
) -> None:
    """Make the key that signs rosters: Ed25519, in PEM without a password, readable by its owner only."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    made, public = Ed25519PrivateKey.generate(), file.with_name(f"{file.name}.pub")
    if public.exists():
        raise _exists(public)
    _write(file, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write(public, made.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    console.note(f"wrote {file}, which stays offline, and {public}, which every device gets")


@app.command()
def export(out: Out = None, home: Home = None) -> None:
    """Print the approved devices and their public keys, unsigned."""
    from thinwire.cli.local_state import open_store
    from thinwire.privacy.pinned_roster import write_roster

    with open_store(home, read_only=True) as store:
        approved = {row.name: row.public_key for row in store.roster.rows() if row.state == "approved"}
    _give(out, write_roster(approved))


@app.command()
def sign(
    roster: Annotated[Path, typer.Argument(metavar="ROSTER.json", help="names and public keys, as export prints them")],
    key: Annotated[Path, typer.Option("--key", metavar="KEY.pem", help="Ed25519 private key in PEM")],
    out: Out = None,
) -> None:
    """Sign a roster with the offline key; compare the fingerprints with the devices' own before."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from thinwire.privacy.pinned_roster import LARGEST, read_roster, sign_roster

    made = _loaded(key, lambda data: load_pem_private_key(data, None), Ed25519PrivateKey, "private")
    devices = read_roster(read_file(roster, LARGEST, "thinwire devices roster export --out ROSTER.json"))
    _give(out, sign_roster(devices, made))
    _say(devices, console.note)


@app.command()
def verify(
    roster: Annotated[Path, typer.Argument(metavar="SIGNED.json", help="signed roster")],
    key: Annotated[Path, typer.Option("--key", metavar="KEY.pem.pub", help="Ed25519 public key in PEM")],
    json: Json = False,
) -> None:
    """Check who signed a roster, and print the fingerprints of its devices."""
    devices = signed_devices(roster, key)
    if json:
        console.document({"devices": {name: _fingerprint(der) for name, der in devices.items()}})
        return
    _say(devices, console.line)


@app.command()
def install(
    roster: Annotated[Path, typer.Argument(metavar="SIGNED.json", help="signed roster")],
    key: Annotated[Path, typer.Option("--key", metavar="KEY.pem.pub", help="Ed25519 public key in PEM")],
    home: Home = None,
) -> None:
    """Have the aggregator select only these devices in runs with [secure] adversary = "malicious"."""
    from thinwire.core.statedir import AggregatorHome, find_home, write_atomically
    from thinwire.privacy.pinned_roster import write_roster

    devices, place = signed_devices(roster, key), AggregatorHome.under(find_home(home))
    write_atomically(place.roster, write_roster(devices))
    _say(devices, console.note)
    console.note(f"wrote {place.roster}; install a new roster in place of it when devices join")


def signed_devices(roster: Path, key: Path) -> dict[str, bytes]:
    """Return the devices of a signed roster: name to public key in DER.

    `UsageError` if a file is not readable or `key` is no public key, `DataLost` if the key did not sign the roster.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    from thinwire.privacy.pinned_roster import LARGEST, SIGN, verify_roster

    public = _loaded(key, load_pem_public_key, Ed25519PublicKey, "public")
    return verify_roster(read_file(roster, LARGEST, SIGN), public)


def _say(devices: dict[str, bytes], say: Any) -> None:
    from thinwire.core.formatting import grouped

    say(f"{len(devices)} device{'s' * (len(devices) != 1)}; the fingerprints of their keys:")
    for name, der in devices.items():
        say(f"  {name}  {grouped(_fingerprint(der))}")


def _fingerprint(der: bytes) -> str:
    import hashlib

    return hashlib.sha256(der).hexdigest()


def _loaded(path: Path, load: Any, kind: type[Any], word: str) -> Any:
    """Return the Ed25519 key in a PEM file; `UsageError` for any other file."""
    from cryptography.exceptions import UnsupportedAlgorithm

    data = read_file(path, LARGEST_KEY, MAKE)
    try:
        found = load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        other, half = {"private": (b"PUBLIC KEY", "KEY.pem"), "public": (b"PRIVATE KEY", "KEY.pem.pub")}[word]
        if other in data:
            why, hint = "it is the other half of a pair", f"--key with the {word} half: {half}, as the help calls it"
            raise _unusable(path, f"{path} is no {word} key in PEM", why, hint) from error
        why = "it is damaged, of another form, or has a password"
        raise _unusable(path, f"{path} is no {word} key in PEM", why) from error
    if not isinstance(found, kind):
        raise _unusable(path, f"{path} is no Ed25519 key", "rosters are signed with keys of this kind only")
    return found


def _unusable(path: Path, what: str, why: str, hint: str = "") -> ThinwireError:
    from thinwire.core.errors import UsageError

    return UsageError(what, why, hint or f"--key with another file than {path.name}; {MAKE}")


def _give(out: Path | None, data: bytes) -> None:
    if out is None:
        console.line(data.decode().rstrip())
        return
    _write(out, data, 0o644)
    console.note(f"wrote {out}")


def _write(path: Path, data: bytes, mode: int) -> None:
    """Create a file; `UsageError` if there is one: a key that is overwritten is lost."""
    from thinwire.core.statedir import disk_error

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise disk_error(error, path) from error


def _exists(path: Path) -> ThinwireError:
    from thinwire.core.errors import UsageError

    return UsageError(f"{path} exists", "keys and rosters are not overwritten", "another name")
