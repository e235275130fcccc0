"""The certificates of the aggregator: a private CA, which devices pin by its key, and a leaf that the CA signs.

Both contain what strict verifiers require (RFC 5280; Python 3.13 sets X509_STRICT): critical constraints, key usages,
and the identifiers of both keys. Name constraints let the CA certify this aggregator alone.

`chains` and `shown` read certificates for people to look at: those in the aggregator's folder, and the one that it
presents. They change nothing.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from thinwire.core.errors import DataLost

STATE = "state.json"  # which certificates of the folder are in use
CA_VALID = timedelta(days=20 * 365)
LEAF_VALID, LEAF_RENEWED = timedelta(days=90), timedelta(days=60)  # a leaf is issued again at the age of 60 days
EARLIER = timedelta(days=1)  # a certificate begins so much earlier, because a verifier's clock may be behind
LOCAL_NETWORKS = ("127.0.0.0/8", "::1/128")
NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name


@dataclass(frozen=True)
class CertificateAndKey:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes

    def require_readable(self) -> None:
        """Raise ValueError if the certificate or the key is damaged."""
        load_pem_private_key(self.key, password=None)
        x509.load_pem_x509_certificate(self.certificate)

    @property
    def parsed(self) -> x509.Certificate:
        """Return the certificate, parsed."""
        return x509.load_pem_x509_certificate(self.certificate)


def pin_of(certificate: x509.Certificate) -> str:
    """Return the SHA-256 (64 hex digits) of the SubjectPublicKeyInfo, equal for every certificate of one key."""
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def server_name(pin: str) -> str:
    """Return the server name that our clients request from a pinned aggregator.

    No resolver knows the name, so a new address changes nothing.
    """
    return f"tw-{pin[:32]}.invalid"


def make_ca(names: Sequence[str], now: datetime) -> CertificateAndKey:
    """Make a CA for its own server name and for these names and addresses, and for nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pin = hashlib.sha256(spki).hexdigest()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Thinwire CA {pin[:16]}")])
    permitted = [server_name(pin), "localhost", *names, *LOCAL_NETWORKS]
    allowed = list(dict.fromkeys(_name(name, ipaddress.ip_network) for name in permitted))
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _begun(subject, subject, key, now, CA_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(permitted_subtrees=allowed, excluded_subtrees=None), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return _signed(builder, key, key)


def make_leaf(
    ca: CertificateAndKey, names: Sequence[str], now: datetime, for_devices: bool = True
) -> CertificateAndKey:  # fmt: skip
    """Issue a certificate for the `names` that the CA may certify.

    Unless it is not `for_devices`, it is also for the CA's server name, which devices look for.
    """
    authority = ca.parsed
    key = ec.generate_private_key(ec.SECP256R1())
    own = [server_name(pin_of(authority))] if for_devices else []
    allowed = [name for name in dict.fromkeys([*own, "localhost", "127.0.0.1", "::1", *names]) if permits(ca, name)]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Thinwire aggregator")])
    issuer_identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _begun(subject, authority.subject, key, now, LEAF_VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in allowed]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_identifier), critical=False
        )
    )
    return _signed(builder, key, _private(ca.key))


def permits(ca: CertificateAndKey, name: str) -> bool:
    """Return True if the CA may certify this name or address."""
    constraints = ca.parsed.extensions.get_extension_for_class(x509.NameConstraints).value
    for allowed in constraints.permitted_subtrees or ():
        if isinstance(allowed, x509.IPAddress):
            try:
                if ipaddress.ip_address(name) in ipaddress.ip_network(allowed.value):
                    return True
            except ValueError:
                continue
        elif isinstance(allowed, x509.DNSName) and (name == allowed.value or name.endswith(f".{allowed.value}")):
            return True
    return False


def due(leaf: CertificateAndKey, names: Sequence[str], ca: CertificateAndKey, now: datetime) -> bool:
    """Return True if a leaf must be issued again: 60 days old, of another CA, or without a name that it could have."""
    found = leaf.parsed
    held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    there = {*held.get_values_for_type(x509.DNSName), *(str(a) for a in held.get_values_for_type(x509.IPAddress))}
    wanted = {_plain(name) for name in names if permits(ca, name)}
    made_at = found.not_valid_before_utc + EARLIER
    return found.issuer != ca.parsed.subject or not wanted <= there or not made_at <= now < made_at + LEAF_RENEWED


def _plain(name: str) -> str:
    """Return an address as a certificate has it, and another name as it is.

    >>> _plain("2001:DB8::0001"), _plain("agg.example")
    ('2001:db8::1', 'agg.example')
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def server_context() -> ssl.SSLContext:
    """Return the TLS context of an aggregator, without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # OpenSSL 1.1 would let strangers request one handshake after another
    context.num_tickets = 0  # a connection lasts for hours; tickets would be half of its first bytes
    return context


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, valid: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - EARLIER)
        .not_valid_after(now.astimezone(UTC) + valid)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey
) -> CertificateAndKey:
    pem = builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)
    return CertificateAndKey(pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _private(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _name(name: str, parse: Callable[[str], Any] = ipaddress.ip_address) -> x509.GeneralName:
    try:
        return x509.IPAddress(parse(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass(frozen=True)
class Leaf:
    """The dates of a certificate that an aggregator presents, and the names and addresses for which it is issued."""

    begins: datetime
    ends: datetime
    names: tuple[str, ...]

    @classmethod
    def of(cls, pem: bytes) -> Leaf:
        """Read a certificate in PEM; raise ValueError if it is none."""
        found = x509.load_pem_x509_certificate(pem)
        names: list[str] = []
        for extension in found.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                names += extension.value.get_values_for_type(x509.DNSName)
                names += map(str, extension.value.get_values_for_type(x509.IPAddress))
        return cls(found.not_valid_before_utc, found.not_valid_after_utc, tuple(names))

    @property
    def renewed_at(self) -> datetime:
        """Return the date on which a running aggregator issues its own leaf again."""
        return self.begins + EARLIER + LEAF_RENEWED


@dataclass(frozen=True)
class Chain:
    """A private CA that is served, and the leaf for devices that trust it. `wanted` are the names of --san."""

    pin: str
    ca_ends: datetime
    leaf: Leaf
    wanted: tuple[str, ...]


def chains(folder: Path) -> Sequence[Chain]:
    """Return the CAs that are served, the latest first; [] if the aggregator never had a private CA.

    Raises `DataLost` if the files are damaged.
    """
    path = folder / STATE
    if not path.exists():
        return []
    try:
        said = json.loads(path.read_bytes())
        return [_chain(folder, str(pin), tuple(said["names"])) for pin in said["pins"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataLost(
            f"cannot read the certificates in {folder}", why=str(error), hint="thinwire aggregator restore"
        ) from error


def shown(host: str, port: int, timeout_s: float) -> Leaf:
    """Return the leaf that a listener presents to a client without a server name; raise OSError if none listens."""
    return Leaf.of(ssl.get_server_certificate((host, port), timeout=timeout_s).encode())


def _chain(folder: Path, pin: str, wanted: tuple[str, ...]) -> Chain:
    ca = x509.load_pem_x509_certificate((folder / f"{pin[:16]}.ca.pem").read_bytes())
    leaf = Leaf.of((folder / f"{pin[:16]}.pem").read_bytes())
    return Chain(pin, ca.not_valid_after_utc, leaf, wanted)
