"""A door's certificates for people to look at: as they lie in its folder, and as it shows them. Nothing is changed."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509

from thinwire.core.errors import DataLost
from thinwire.flower.wire.certificates import EARLIER, LEAF_RENEWED, STATE


@dataclass(frozen=True)
class Leaf:
    """What a door shows: the names and addresses that it is for, and the dates."""

    begins: datetime
    ends: datetime
    names: tuple[str, ...]

    @classmethod
    def of(cls, pem: bytes) -> Leaf:
        """ValueError for what is no certificate."""
        found = x509.load_pem_x509_certificate(pem)
        names: list[str] = []
        for extension in found.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                names += extension.value.get_values_for_type(x509.DNSName)
                names += map(str, extension.value.get_values_for_type(x509.IPAddress))
        return cls(found.not_valid_before_utc, found.not_valid_after_utc, tuple(names))

    @property
    def renewed_at(self) -> datetime:
        """When a running aggregator makes one of ours anew."""
        return self.begins + EARLIER + LEAF_RENEWED


@dataclass(frozen=True)
class Chain:
    """A CA of ours that is served, and the leaf that is shown to who holds it. `wanted`: the names of --san."""

    pin: str
    ca_ends: datetime
    leaf: Leaf
    wanted: tuple[str, ...]


def chains(folder: Path) -> Sequence[Chain]:
    """The newest first; none where there was never a door with a CA of our own. `DataLost` where they are damaged."""
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
    """The leaf that a listener shows to who names no server; OSError where none listens."""
    return Leaf.of(ssl.get_server_certificate((host, port), timeout=timeout_s).encode())


def _chain(folder: Path, pin: str, wanted: tuple[str, ...]) -> Chain:
    ca = x509.load_pem_x509_certificate((folder / f"{pin[:16]}.ca.pem").read_bytes())
    leaf = Leaf.of((folder / f"{pin[:16]}.pem").read_bytes())
    return Chain(pin, ca.not_valid_after_utc, leaf, wanted)
