"""`thinwire devices roster`: the offline key, the approved devices, and who signed them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from thinwire.privacy.pinned_roster import read_roster, verify_roster


def identity(number: int) -> bytes:
    key = ec.derive_private_key(number, ec.SECP256R1()).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def fleet(store) -> None:
    """Three approved devices and one that was revoked."""
    for number in (1, 2, 3, 4):
        der = identity(number)
        store.roster.enrol(f"pi-0{number}", hashlib.sha256(der).hexdigest(), der, "loopback")
    store.roster.revoke("pi-04")


@pytest.fixture
def key(thinwire, tmp_path: Path) -> Path:
    path = tmp_path / "offline.pem"
    assert thinwire("devices", "roster", "key", path).code == 0
    return path


@pytest.fixture
def signed(thinwire, home, tmp_path: Path, fleet, key) -> Path:
    exported, path = tmp_path / "roster.json", tmp_path / "signed.json"
    assert thinwire("devices", "roster", "export", "--out", exported, "--home", home).code == 0
    assert thinwire("devices", "roster", "sign", exported, "--key", key, "--out", path).code == 0
    return path


def refused(said, code: int, *words: str) -> None:
    assert said.code == code, said
    assert [line.partition(":")[0] for line in said.err.splitlines() if line[:1] != " "] == ["error", "why", "try"]
    for word in words:
        assert word in said.err, said.err


def test_a_device_reads_the_approved_devices_of_a_signed_roster(signed, key):
    public = load_pem_public_key(Path(f"{key}.pub").read_bytes())
    assert isinstance(public, Ed25519PublicKey)
    assert verify_roster(signed.read_bytes(), public) == {f"pi-0{number}": identity(number) for number in (1, 2, 3)}


def test_the_aggregator_gets_a_roster_that_the_key_signed_and_no_other(thinwire, home, signed, key, tmp_path):
    installed = home / "roster.json"
    signed.write_text(signed.read_text().replace("pi-01", "pi-09"))
    refused(thinwire("devices", "roster", "install", signed, "--key", f"{key}.pub", "--home", home), 8, "not signed")
    assert not installed.exists()
    signed.write_text(signed.read_text().replace("pi-09", "pi-01"))
    for _ in (1, 2):
        said = thinwire("devices", "roster", "install", signed, "--key", f"{key}.pub", "--home", home)
        assert said.code == 0, said.err
        assert read_roster(installed.read_bytes()) == {f"pi-0{number}": identity(number) for number in (1, 2, 3)}


def test_export_prints_names_and_keys_of_approved_devices(thinwire, home, fleet):
    said = thinwire("devices", "roster", "export", "--home", home)
    assert (said.code, list(said.document)) == (0, ["pi-01", "pi-02", "pi-03"])


def test_verify_prints_the_fingerprints_to_compare(thinwire, signed, key):
    said = thinwire("devices", "roster", "verify", signed, "--key", f"{key}.pub")
    assert (said.code, said.out.splitlines()[0]) == (0, "3 devices; the fingerprints of their keys:")
    assert hashlib.sha256(identity(2)).hexdigest() in said.out.replace(" ", "")
    told = thinwire("devices", "roster", "verify", signed, "--key", f"{key}.pub", "--json")
    assert told.document == {"devices": {f"pi-0{n}": hashlib.sha256(identity(n)).hexdigest() for n in (1, 2, 3)}}


def test_a_roster_that_was_changed_or_signed_by_another_is_refused(thinwire, tmp_path, signed, key):
    table = json.loads(signed.read_text())
    del table["devices"]["pi-02"]
    (tmp_path / "less.json").write_text(json.dumps(table))
    refused(
        thinwire("devices", "roster", "verify", tmp_path / "less.json", "--key", f"{key}.pub"), 8,
        "the roster is not signed by this key",
    )  # fmt: skip
    assert thinwire("devices", "roster", "key", tmp_path / "other.pem").code == 0
    refused(
        thinwire("devices", "roster", "verify", signed, "--key", tmp_path / "other.pem.pub"),
        8,
        "not signed by this key",
    )


def test_the_private_key_is_its_owners_only_and_is_never_overwritten(thinwire, tmp_path, key):
    assert (key.stat().st_mode & 0o777, Path(f"{key}.pub").stat().st_mode & 0o077) == (0o600, 0o044)
    before = key.read_bytes()
    refused(thinwire("devices", "roster", "key", key), 2, "exists")
    (tmp_path / "new.pem.pub").write_text("")
    refused(thinwire("devices", "roster", "key", tmp_path / "new.pem"), 2, "new.pem.pub exists")
    assert (key.read_bytes(), (tmp_path / "new.pem").exists()) == (before, False)


def test_a_signed_roster_is_not_overwritten(thinwire, tmp_path, signed, key):
    before = signed.read_bytes()
    refused(thinwire("devices", "roster", "sign", tmp_path / "roster.json", "--key", key, "--out", signed), 2, "exists")
    assert signed.read_bytes() == before


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_a_key_that_openssl_made_signs_too(thinwire, tmp_path, signed):
    made, public = tmp_path / "made.pem", tmp_path / "made.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", made], check=True)
    subprocess.run(["openssl", "pkey", "-in", made, "-pubout", "-out", public], check=True)
    said = thinwire("devices", "roster", "sign", tmp_path / "roster.json", "--key", made, "--out", tmp_path / "s.json")
    assert said.code == 0
    assert thinwire("devices", "roster", "verify", tmp_path / "s.json", "--key", public).code == 0


def test_a_key_of_another_kind_is_refused(thinwire, tmp_path, signed, key):
    unlike = ec.generate_private_key(ec.SECP256R1())
    secret = PrivateFormat.PKCS8
    (tmp_path / "p256.pem").write_bytes(unlike.private_bytes(Encoding.PEM, secret, NoEncryption()))
    (tmp_path / "locked.pem").write_bytes(
        unlike.private_bytes(Encoding.PEM, secret, BestAvailableEncryption(b"password"))
    )
    (tmp_path / "no.pem").write_text("no key")
    for file, word in (
        ("p256.pem", "no Ed25519 key"),
        ("locked.pem", "has a password"),
        ("no.pem", "no private key in PEM"),
        ("offline.pem.pub", "other half of a pair"),
        ("absent.pem", "cannot read"),
    ):
        refused(thinwire("devices", "roster", "sign", tmp_path / "roster.json", "--key", tmp_path / file), 2, word)
    refused(thinwire("devices", "roster", "verify", signed, "--key", key), 2, "other half of a pair")
    refused(thinwire("devices", "roster", "verify", signed, "--key", key), 2, "the public half: KEY.pem.pub")


def test_a_signed_roster_is_not_signed_again_and_a_key_that_is_no_text_is_named(thinwire, tmp_path, signed, key):
    refused(thinwire("devices", "roster", "sign", signed, "--key", key), 8, "the roster is signed")
    (tmp_path / "odd.json").write_text('{"pi-01": 7}')
    refused(thinwire("devices", "roster", "sign", tmp_path / "odd.json", "--key", key), 8, "it is no text")


def test_what_is_no_roster_is_not_signed(thinwire, tmp_path, signed, key):
    (tmp_path / "bad.json").write_text('{"pi-01": "AAAA"}')
    refused(thinwire("devices", "roster", "sign", tmp_path / "bad.json", "--key", key), 8, "the key of pi-01")
    refused(thinwire("devices", "roster", "sign", signed, "--key", key), 8)
    refused(thinwire("devices", "roster", "sign", tmp_path / "none.json", "--key", key), 2, "cannot read")
    refused(
        thinwire("devices", "roster", "verify", tmp_path / "roster.json", "--key", f"{key}.pub"), 8, "no signed roster"
    )


def test_an_aggregator_without_devices_has_no_roster(thinwire, home, store):
    refused(thinwire("devices", "roster", "export", "--home", home), 8, "the roster has no device")
