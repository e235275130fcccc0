"""A device's key: P-384, made at the first start, never leaving its folder."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from thinwire.core.errors import DataLost
from thinwire.core.home import keep_private, write_atomically

KEY_FILE = "key.pem"


def device_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """The key in this folder, made (mode 0600, whole or not at all) where there is none."""
    path = folder / KEY_FILE
    if not path.exists():
        made = ec.generate_private_key(ec.SECP384R1())
        write_atomically(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    keep_private(path)
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataLost(
            f"cannot read the key {path}", why=str(error), hint="restore it, or take another --name"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise DataLost(f"{path} is no P-384 key", why="only that kind is used", hint="restore it")
    return key
