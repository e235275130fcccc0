"""The pinned roster: names and identity keys of approved devices, in a file that an offline Ed25519 key has signed.

`[secure] adversary = "malicious"` needs it. An aggregator that could choose the identity keys of a round could invent
all clients but one, and subtract their updates. The offline key is never on the aggregator's machine, and each device
gets the file and the public key from its owner.

A file is JSON. Unsigned it is {"NAME": "KEY", ...}, KEY the base64 of a P-256 or P-384 public key (DER,
SubjectPublicKeyInfo). Signed it is {"format": FORMAT, "devices": {...}, "signature": "..."}. The signature is over
FORMAT and the devices in the order of their names, each field after its length in 8 bytes little-endian. So it does not
depend on how the JSON is laid out.

Invariant: no two names have one key, and no name occurs twice.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.core.errors import DataLost
from thinwire.core.types import require_device_name

FORMAT = "thinwire roster 1"
LARGEST = 32 << 20  # bytes of a file: 65 535 devices have less
CURVES = (ec.SECP256R1, ec.SECP384R1)
UNSIGNED = '{"NAME": "KEY", ...}, as thinwire devices roster export prints it'
SIGN = "thinwire devices roster sign ROSTER.json --key KEY.pem --out SIGNED.json"


def write_roster(devices: Mapping[str, bytes]) -> bytes:
    """Return the unsigned file of these devices: name to identity key in DER. Raise `DataLost` for no valid roster."""
    _check(devices)
    return json.dumps(_encoded(devices), indent=1).encode() + b"\n"


def read_roster(raw: bytes) -> dict[str, bytes]:
    """Return the devices of an unsigned file, sorted by name; raise `DataLost` with what is wrong with it."""
    table = _table(raw, "the roster", f"it reads {UNSIGNED}")
    if table.get("format") == FORMAT:
        raise DataLost("the roster is signed", "what is signed or exported is not", f"the unsigned one: {UNSIGNED}")
    return _decoded(table)


def sign_roster(devices: Mapping[str, bytes], key: Ed25519PrivateKey) -> bytes:
    """Return the signed file of these devices. Raise `DataLost` for no valid roster."""
    _check(devices)
    signature = base64.b64encode(key.sign(_signed_bytes(devices))).decode()
    return (
        json.dumps({"format": FORMAT, "devices": _encoded(devices), "signature": signature}, indent=1).encode() + b"\n"
    )


def verify_roster(signed: bytes, key: Ed25519PublicKey) -> dict[str, bytes]:
    """Return the devices of a signed file, sorted by name.

    Raise `DataLost` if this key did not sign exactly these devices, or if the file is no signed roster.
    """
    table = _table(signed, "the signed roster", SIGN)
    if set(table) != {"format", "devices", "signature"} or table["format"] != FORMAT:
        raise DataLost("this is no signed roster", f'it has no format = "{FORMAT}", devices and signature', SIGN)
    if not isinstance(table["devices"], dict) or not isinstance(table["signature"], str):
        raise DataLost("this is no signed roster", "devices is a table of names, and signature is a text", SIGN)
    devices = _decoded(table["devices"])
    try:
        key.verify(base64.b64decode(table["signature"], validate=True), _signed_bytes(devices))
    except (InvalidSignature, binascii.Error) as error:
        raise DataLost(
            "the roster is not signed by this key",
            "another key signed it, or its devices were changed after that",
            "compare the key with its owner's, and get the file from the owner again",
        ) from error
    return devices


def _signed_bytes(devices: Mapping[str, bytes]) -> bytes:
    fields = [FORMAT.encode(), *(part for name in sorted(devices) for part in (name.encode(), devices[name]))]
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def _encoded(devices: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(devices[name]).decode() for name in sorted(devices)}


def _decoded(table: Mapping[str, Any]) -> dict[str, bytes]:
    devices = dict[str, bytes]()
    for name in sorted(table):
        try:
            devices[name] = base64.b64decode(table[name], validate=True)
        except (TypeError, ValueError) as error:
            why = str(error) if isinstance(table[name], str) else "it is no text"
            raise DataLost(f"the key of {name[:80]!r} is not base64", why, f"it reads {UNSIGNED}") from error
    _check(devices)
    return devices


def _table(raw: bytes, what: str, hint: str) -> dict[str, Any]:
    """Return a JSON table in which no name occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        if len(raw) > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        table = json.loads(raw, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DataLost(f"{what} is not readable", str(error), hint) from error
    if not isinstance(table, dict):
        raise DataLost(f"{what} is not readable", "it is no JSON table", hint)
    return table


def _check(devices: Mapping[str, bytes]) -> None:
    """Raise `DataLost` if a name or a key is not valid, if two names have one key, or if there is no device."""
    if not devices:
        raise DataLost("the roster has no device", "nobody could take part", "thinwire devices approve NAME")
    owners = dict[bytes, str]()
    for name, key in devices.items():
        require_device_name(name, "a device's name, as thinwire devices list shows it", DataLost)
        if not _is_identity(key):
            raise DataLost(
                f"the key of {name} is no identity key of a device",
                "it is no P-256 or P-384 public key in DER (SubjectPublicKeyInfo)",
                "leave the device out, or let it join again",
            )
        if key in owners:
            raise DataLost(
                f"{owners[key]} and {name} have one key",
                "one device could take part twice, and reveal the sum of fewer clients than it seems",
                f"leave {name} out, or let it join with a key of its own",
            )
        owners[key] = name


def _is_identity(der: bytes) -> bool:
    """Return True if these bytes are the canonical DER form of a P-256 or P-384 public key."""
    try:
        key = load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm):
        return False
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        return False
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) == der
