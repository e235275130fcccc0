"""The certificates of a device API: what they hold, who verifies them, how they are renewed and replaced."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.transport_doubles import drawn_invitation
from thinwire.core.errors import DataLost, UsageError
from thinwire.core.invitation import SYSTEM, Invitation
from thinwire.transport.device.identity import Trust
from thinwire.transport.protocol.certificates import chains, make_ca, make_leaf, pin_of, server_name
from thinwire.transport.server.tls import InternalCA, OperatorCertificate

MAY = datetime(2026, 5, 1, tzinfo=UTC)


@dataclass
class Calendar:
    """A day that moves when it is told to."""

    today: datetime = field(default=MAY)

    def __call__(self) -> datetime:
        return self.today


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends


def names_shown(authority: InternalCA, cas: Sequence[str], name: str) -> list[str]:
    client, _ = shaken(authority.context, Trust("", tuple(cas)).context(), name)
    found = client.getpeercert()
    assert found is not None
    pairs: Any = found["subjectAltName"]
    return [str(value) for _, value in pairs]


def test_a_first_start_makes_a_ca_and_a_leaf_that_strict_clients_verify(tmp_path: Path) -> None:
    authority = InternalCA(tmp_path, ["agg.example", "192.0.2.7"])
    shown = names_shown(authority, authority.cas(), authority.server_name())
    assert {authority.server_name(), "localhost", "agg.example", "192.0.2.7"} <= set(shown)
    assert names_shown(authority, authority.cas(), "192.0.2.7") == shown
    assert authority.pin == pin_of(x509.load_pem_x509_certificate(authority.cas()[0].encode()))
    assert authority.server_name() == f"tw-{authority.pin[:32]}.invalid"


def test_the_files_are_the_owners_alone(tmp_path: Path) -> None:
    InternalCA(tmp_path / "tls")
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == {0o600}


def test_the_ca_is_a_p256_one_for_twenty_years_that_may_name_nothing_else(tmp_path: Path) -> None:
    ca = make_ca(["agg.example"], MAY).parsed
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)
    assert ca.public_key().curve.name == "secp256r1"  # type: ignore[union-attr]  # as asserted
    assert timedelta(days=19 * 365) < ca.not_valid_after_utc - MAY < timedelta(days=21 * 365)
    for kind, critical in ((x509.BasicConstraints, True), (x509.KeyUsage, True), (x509.NameConstraints, True),
                           (x509.SubjectKeyIdentifier, False), (x509.AuthorityKeyIdentifier, False)):  # fmt: skip
        assert ca.extensions.get_extension_for_class(kind).critical == critical


@pytest.mark.parametrize("name", ["bank.example", "agg.example.evil.example", "10.1.2.3"])
def test_a_leaf_of_a_stolen_ca_for_another_name_is_not_verified(name: str) -> None:
    ca = make_ca(["agg.example"], datetime.now(UTC))
    forged = _forged(ca, name)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*forged)
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree"):
        shaken(server, Trust("", (ca.certificate.decode(),)).context(), name)


def served(folder: Path) -> x509.Certificate:
    """The leaf of the one CA in this folder."""
    (leaf,) = (path for path in folder.glob("*.pem") if not path.name.endswith(".ca.pem"))
    return x509.load_pem_x509_certificate(leaf.read_bytes())


def test_a_leaf_lasts_ninety_days_and_is_renewed_at_sixty_into_the_live_context(tmp_path: Path) -> None:
    day = Calendar()
    authority = InternalCA(tmp_path, now=day)
    context, first = authority.context, served(tmp_path)
    assert first.not_valid_after_utc - MAY == timedelta(days=90)
    standing, _ = shaken(context, Trust("", authority.cas()).context(), authority.server_name())
    day.today = MAY + timedelta(days=59)
    assert (authority.renew(), served(tmp_path)) == (False, first)
    day.today = MAY + timedelta(days=60)
    assert not authority.renew()
    second = served(tmp_path)
    assert second.not_valid_after_utc == day.today + timedelta(days=90)
    assert authority.context is context
    shown, _ = shaken(context, Trust("", authority.cas()).context(), authority.server_name())
    assert shown.getpeercert(binary_form=True) != standing.getpeercert(binary_form=True)
    assert standing.version() == "TLSv1.3", "the connection from before is still there"


def test_a_leaf_is_verified_whatever_the_date(tmp_path: Path) -> None:
    past = InternalCA(tmp_path, now=lambda: datetime(1999, 1, 1, tzinfo=UTC))
    assert names_shown(past, past.cas(), past.server_name())


def test_a_second_start_shows_the_same_ca_and_leaf(tmp_path: Path) -> None:
    first, leaf = InternalCA(tmp_path), served(tmp_path)
    second = InternalCA(tmp_path)
    assert (first.pin, first.cas(), leaf) == (second.pin, second.cas(), served(tmp_path))


def test_a_name_that_the_ca_may_not_name_is_refused_with_the_way_out(tmp_path: Path) -> None:
    InternalCA(tmp_path, ["agg.example"])
    InternalCA(tmp_path, ["door.agg.example"])
    with pytest.raises(UsageError) as refused:
        InternalCA(tmp_path, ["other.example"])
    assert "ca rotate --san other.example" in refused.value.hint
    with pytest.raises(UsageError, match="no name"):
        InternalCA(tmp_path, ["a b"])


def test_during_a_rotation_each_device_sees_the_chain_that_it_can_verify(tmp_path: Path) -> None:
    authority = InternalCA(tmp_path)
    old, name = authority.cas(), authority.server_name()
    new = InternalCA(tmp_path).rotate(["new.example"])
    assert authority.renew(), "what another process rotated is read"
    assert (authority.pin, authority.server_name()) == (new, server_name(new))
    assert len(authority.cas()) == 2
    assert names_shown(authority, old, name)
    assert "new.example" in names_shown(authority, authority.cas()[:1], server_name(new))
    with pytest.raises(ssl.SSLCertVerificationError):
        names_shown(authority, old, server_name(new))


def test_the_old_ca_is_served_until_every_device_has_confirmed(tmp_path: Path) -> None:
    authority = InternalCA(tmp_path)
    old = authority.pin
    new = authority.rotate()
    for holds in ([], [(old, new), (old,)], [()]):
        authority.confirmed(holds)
        assert [chain.pin for chain in chains(tmp_path)] == [new, old]
    authority.confirmed([(old, new), (new,)])
    assert [chain.pin for chain in chains(tmp_path)] == [new]
    assert len(InternalCA(tmp_path).cas()) == 1


@pytest.mark.parametrize("file", ["state.json", "ca.pem", "ca.key"])
def test_a_damaged_folder_is_refused_and_not_replaced(tmp_path: Path, file: str) -> None:
    pin = InternalCA(tmp_path).pin
    path = tmp_path / (file if file == "state.json" else f"{pin[:16]}.{file}")
    path.write_text("{}")
    with pytest.raises(DataLost):
        InternalCA(tmp_path).rotate()
        InternalCA(tmp_path, now=lambda: MAY + timedelta(days=4000))
    assert path.read_text() == "{}"


def test_ones_own_certificate_is_used_and_its_ca_pinned(tmp_path: Path) -> None:
    ca = make_ca(["agg.example"], datetime.now(UTC))
    leaf = make_leaf(ca, ["agg.example"], datetime.now(UTC))
    files = {"cert": leaf.certificate, "key": leaf.key, "ca": ca.certificate}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    given = OperatorCertificate(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    assert (given.pin, given.server_name()) == (pin_of(ca.parsed), "")
    assert shaken(given.context, Trust("", given.cas()).context(), "agg.example")[0].version()
    assert OperatorCertificate(tmp_path / "cert", tmp_path / "key").pin == SYSTEM
    (tmp_path / "cert").write_text("gone")
    assert not given.renew(), "the one that was loaded goes on"
    with pytest.raises(UsageError):
        OperatorCertificate(tmp_path / "cert", tmp_path / "key")


def test_an_invitation_is_read_as_it_was_written() -> None:
    drawn = drawn_invitation("ab" * 32)
    assert Invitation.parse(f" {drawn.text()}\n") == Invitation.parse(drawn.text().upper()) == drawn
    assert len(drawn.text()) == 101
    assert len(drawn.secret) == 32
    for text in ("", "tw1", drawn.text()[:-1], f"tw2{drawn.text()[3:]}", "tw1.pin.secret"):
        with pytest.raises(UsageError) as refused:
            Invitation.parse(text)
        assert drawn.secret not in refused.value.text()
    with pytest.raises(UsageError, match="this is no invitation") as refused:
        Invitation.parse(f"{drawn.text()[:-1]}x")
    assert "one of its letters is wrong" in refused.value.text()


def _forged(ca: object, name: str) -> tuple[str, str]:
    """A leaf that this CA signed for a name that it may not name."""
    import tempfile

    from thinwire.transport.protocol import certificates

    whole = certificates.permits
    certificates.permits = lambda *_: True
    try:
        leaf = make_leaf(ca, [name], datetime.now(UTC))  # type: ignore[arg-type]  # an Issued
    finally:
        certificates.permits = whole
    folder = Path(tempfile.mkdtemp())
    (folder / "leaf").write_bytes(leaf.certificate)
    (folder / "key").write_bytes(leaf.key)
    return str(folder / "leaf"), str(folder / "key")


def test_state_names_what_is_served(tmp_path: Path) -> None:
    authority = InternalCA(tmp_path, ["agg.example"])
    assert json.loads((tmp_path / "state.json").read_bytes()) == {"pins": [authority.pin], "names": ["agg.example"]}


@pytest.mark.parametrize(
    ("which", "text", "said"),
    [
        ("ca", None, "No such file"), ("ca", "words", "no certificate"), ("key", None, "No such file"),
        ("key", "words", "no such PEM"), ("key", "another", "not that of the certificate"),
        ("key", "locked", "password"),
    ],
)  # fmt: skip
def test_files_that_make_no_certificate_are_refused_with_the_reason(
    tmp_path: Path, which: str, text: str | None, said: str
) -> None:
    ca = make_ca(["agg.example"], datetime.now(UTC))
    leaf = make_leaf(ca, ["agg.example"], datetime.now(UTC))
    locked = serialization.load_pem_private_key(leaf.key, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    files = {"cert": leaf.certificate, "key": leaf.key, "ca": ca.certificate}
    given = {None: None, "words": b"words", "another": ca.key, "locked": locked}[text]
    for name, data in {**files, which: given}.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=said):
        OperatorCertificate(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
