"""A public key from a file, as OpenSSH and Flower write them."""

from __future__ import annotations

from pathlib import Path

KIND = "ecdsa-sha2-nistp384"
LONGEST = 16 * 1024  # bytes; a line is some 200
HINT = "ssh-keygen -t ecdsa -b 384 makes a pair; the public one is the file that ends in .pub"


def read_public_key(path: Path) -> bytes:
    """The DER SubjectPublicKeyInfo of an OpenSSH P-384 key; `UsageError` for anything else.

    Written anew from the numbers in it: one key has one DER form, whatever the file looked like.
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
