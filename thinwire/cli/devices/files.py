"""Read and write the files of an operator: a CSV file of invitations, a list of names, a public key."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from thinwire.cli.params import read_file
from thinwire.core.invitation import COLUMNS


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
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read the names in {path}", why=why, hint="one name a line") from error
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

    data = read_file(path, LONGEST, "--key FILE.pub")
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
