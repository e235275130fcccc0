"""Invitations as the operator hands them out, and public keys of stock Flower nodes.

An invitation names the URL and the pin of the device API, from `tls/invite.json` of the aggregator's last start. It is
printed with the command to paste on the device, or written to a CSV file of many.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from thinwire.cli.local_state import again

if TYPE_CHECKING:
    from thinwire.store import Invited


COLUMNS = ("id", "name", "url", "invitation", "command", "expires_at")
_PIN = re.compile(r"[0-9a-f]{64}|system")


@dataclass(frozen=True)
class DoorPlace:
    """The URLs and the pin of the device API, as the aggregator's last start wrote them to `tls/invite.json`."""

    pin: str
    urls: tuple[str, ...]

    @classmethod
    def of(cls, home: Path | None) -> DoorPlace:
        """Read `tls/invite.json`; `NotFound` if the device API has never listened on an address for other machines."""
        from thinwire.core.errors import NotFound
        from thinwire.core.statedir import find_home

        path = find_home(home) / "aggregator" / "tls" / "invite.json"
        try:
            said = json.loads(path.read_bytes())
            place = cls(str(said["pin"]), tuple(str(url) for url in said["urls"]))
        except (OSError, ValueError, KeyError, TypeError):
            place = cls("", ())
        if not _PIN.fullmatch(place.pin) or not place.urls:
            raise NotFound(
                "there is no door to invite to yet",
                why="an invitation names its address and certificate, and it has listened on this machine only",
                hint=again("aggregator start --listen 0.0.0.0:9090", home),
            )
        return place

    def text(self, invited: Invited) -> str:
        """Return the invitation for the device's owner: `tw1.PIN.SECRET`."""
        from thinwire.transport.protocol.registration import Invitation

        return Invitation(self.pin, invited.secret).text()

    def command(self, invited: Invited) -> str:
        """Return the command to type on the device.

        The device reads the secret from standard input, so that no list of processes shows it.
        """
        return f"thinwire client join {self.urls[0]} -" + (f" --name {invited.name}" if invited.name else "")

    def row(self, invited: Invited) -> dict[str, Any]:
        """Return an invitation as a row of the CSV file, by the names of `COLUMNS`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(invited.expires_at))
        values = (invited.id, invited.name, self.urls[0], self.text(invited), self.command(invited), moment)
        return dict(zip(COLUMNS, values, strict=True))


@contextlib.contextmanager
def new_table(path: Path) -> Iterator[IO[str]]:
    """Create a file that only its owner can read, and remove it if the block fails; `UsageError` if it exists."""
    from thinwire.core.errors import UsageError
    from thinwire.core.statedir import disk_error

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        why = "the invitations in it may not have been used yet"
        raise UsageError(f"{path} is there already", why=why, hint="--out with another name") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"there is no folder {path.parent}", hint="--out in one that is there") from error
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as file:
            yield file
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def write_table(file: IO[str], rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as CSV with a header; they are durable on return."""
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    file.flush()
    os.fsync(file.fileno())


def read_names(path: Path) -> list[str]:
    """Return the names of a file, one in each line; empty lines and those with # are skipped."""
    from thinwire.core.errors import UsageError

    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the names in {path}", why=str(error), hint="one name a line") from error
    if names := [line for line in lines if line and not line.startswith("#")]:
        return names
    raise UsageError(f"there is no name in {path}", hint="one name a line: a-z, 0-9 and -")


KIND = "ecdsa-sha2-nistp384"
LONGEST = 16 * 1024  # bytes; a key file has about 200
HINT = "ssh-keygen -t ecdsa -b 384 makes a pair; the public one is the file that ends in .pub"


def read_public_key(path: Path) -> bytes:
    """Return the DER SubjectPublicKeyInfo of an OpenSSH P-384 public key, as OpenSSH and Flower write them.

    The DER is encoded again from the numbers in the file, so that one key has one form. `UsageError` for any other
    file.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    from thinwire.core.errors import UsageError

    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error), hint="--key FILE.pub") from error
    if b"PRIVATE KEY" in data:
        raise UsageError(
            f"{path} is a private key", why="it must not leave its device", hint="--key FILE.pub, the other one"
        )
    try:
        key = load_ssh_public_key(data.strip())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no public key of OpenSSH's form", why=str(error), hint=HINT) from error
    if len(data) > LONGEST or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UsageError(f"{path} is no {KIND} key", why="Flower's nodes use that kind only", hint=HINT)
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
