"""A signed roster gives back exactly the devices that were signed; whatever else is refused with a reason."""

from __future__ import annotations

import base64
import json
from functools import cache

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import DataLost
from thinwire.privacy.pinned_roster import FORMAT, LARGEST, read_roster, sign_roster, verify_roster, write_roster

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
SIGNATURE = (
    "drtaAZj5A4PGaxOWdGNPoG0nF+/O6t+FRfbFBTElsuMjbIP4DAmTXvcvqJxo0Pd4i3ajPnTK9p5yZhWgItW4BA=="  # of {"a": identity(0)}
)


@cache
def identity(number: int, curve: type[ec.EllipticCurve] = ec.SECP256R1) -> bytes:
    key = ec.derive_private_key(number + 1, curve()).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


DEVICES = {"pi-02": identity(2), "pi-01": identity(1), "stock": identity(3, ec.SECP384R1)}
names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,61}[a-z0-9]", fullmatch=True)


def changed(**keys: object) -> bytes:
    return json.dumps(json.loads(sign_roster(DEVICES, KEY)) | keys).encode()


def refused(signed: bytes, key: Ed25519PrivateKey = KEY) -> DataLost:
    with pytest.raises(DataLost) as error:
        verify_roster(signed, key.public_key())
    assert error.value.why
    assert error.value.hint
    return error.value


@given(st.lists(names, min_size=1, max_size=5, unique=True))
def test_what_was_signed_is_what_a_device_reads(listed):
    devices = {name: identity(number) for number, name in enumerate(listed)}
    found = verify_roster(sign_roster(devices, KEY), KEY.public_key())
    assert found == devices
    assert list(found) == sorted(devices)
    assert read_roster(write_roster(devices)) == devices


def test_a_roster_signed_by_another_key_is_refused():
    assert refused(sign_roster(DEVICES, OTHER)).what == "the roster is not signed by this key"


def test_the_layout_of_the_json_is_not_signed_and_its_content_is():
    signed = json.loads(sign_roster(DEVICES, KEY))
    turned = {name: signed["devices"][name] for name in reversed(signed["devices"])}
    assert verify_roster(changed(devices=turned), KEY.public_key()) == DEVICES
    keys = signed["devices"]
    swapped = keys | {"pi-01": keys["pi-02"], "pi-02": keys["pi-01"]}
    for devices in (
        swapped,
        {name: keys[name] for name in ("pi-01", "pi-02")},
        keys | {"pi-03": base64.b64encode(identity(9)).decode()},
        {f"x{name}": der for name, der in keys.items()},
    ):
        assert refused(changed(devices=devices)).what == "the roster is not signed by this key"


@settings(deadline=None)
@given(st.integers(0, 511))
def test_every_bit_of_the_signature_counts(bit):
    signature = bytearray(base64.b64decode(json.loads(sign_roster(DEVICES, KEY))["signature"]))
    signature[bit // 8] ^= 1 << bit % 8
    refused(changed(signature=base64.b64encode(signature).decode()))


@pytest.mark.parametrize(
    "signed",
    [
        b"", b"[]", b"{", b"1", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}',
        write_roster(DEVICES),
        changed(format="thinwire roster 2"), changed(more=1), changed(devices=[]), changed(devices={}),
        changed(signature=None), changed(signature="?"), changed(signature=""), changed(devices={"pi-01": 3}),
        changed(devices={"pi-01": "?"}),
        b" " * (LARGEST + 1),
    ],
)  # fmt: skip
def test_a_file_that_is_no_signed_roster_is_refused(signed):
    refused(signed)


def test_a_name_that_occurs_twice_is_refused():
    """A reader that takes the first and one that takes the last would pin two keys."""
    key = base64.b64encode(identity(1)).decode()
    with pytest.raises(DataLost, match="a name occurs twice"):
        read_roster(f'{{"pi-01": "{key}", "pi-01": "{key}"}}'.encode())


point = x25519.X25519PrivateKey.from_private_bytes(bytes(32)).public_key()
compressed = ec.derive_private_key(5, ec.SECP256R1()).public_key()


@pytest.mark.parametrize(
    ("devices", "what"),
    [
        ({}, "the roster has no device"),
        ({"PI": identity(1)}, "'PI' is no name for a device"),
        ({"pi-01": b"key"}, "the key of pi-01 is no identity key of a device"),
        ({"pi-01": identity(1) + b"\0"}, "the key of pi-01 is no identity key"),
        ({"pi-01": identity(1, ec.SECP521R1)}, "the key of pi-01 is no identity key"),
        ({"pi-01": point.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)}, "the key of pi-01"),
        ({"pi-01": compressed.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)}, "the key of pi-01"),
        ({"a": identity(1), "b": identity(2), "c": identity(1)}, "a and c have one key"),
    ],
)
def test_devices_that_could_not_be_told_apart_are_not_signed(devices, what):
    for make in (write_roster, lambda given: sign_roster(given, KEY)):
        with pytest.raises(DataLost) as error:
            make(devices)
        assert error.value.what.startswith(what)
        assert error.value.hint


def test_the_signed_bytes_stay_the_same_for_ever():
    """A signature of today must hold on a device of a later version."""
    assert FORMAT == "thinwire roster 1"
    assert json.loads(sign_roster({"a": identity(0)}, KEY))["signature"] == SIGNATURE
