"""The messages of secure aggregation: their fields and their bytes.

Five phases of a secure round exchange these messages (docs/explain/secure-aggregation.md):

    phase      client to aggregator      aggregator to client
    advertise  `Advertisement`           `Roster`
    share      `Shares`                  `Delivery`
    masked     two masked vectors        `Survivors`
    agree      a signature               `Agreements`
    unmask     `Disclosure`

A client has an index in the round: its position in the roster, from 1. The index is also the x of its Shamir shares.

Invariant: `read` allocates nothing that the message's own length does not cover, accepts exactly the bytes that `write`
makes for the same fields, and raises `BadMessage` for all others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.errors import BadPayload
from thinwire.core.types import DEVICE_NAME, Phase
from thinwire.privacy.contexts import digest, index_list
from thinwire.privacy.keys import ML_KEM_CIPHERTEXT_BYTES, ML_KEM_PUBLIC_BYTES, PublicKeys
from thinwire.privacy.shamir import SHARE_BYTES

HASH_BYTES = 32
PROCESS_BYTES = 16
MAX_KEY_BYTES = 160  # of an identity key in DER; a P-384 key has 120
MAX_SIGNATURE_BYTES = 112  # of an ECDSA signature in DER; P-384 has at most 104
SEALED_BYTES = 2 * SHARE_BYTES + 16  # the shares of root and self mask, with the tag of AES-GCM
SECRET_BYTES = 32


class BadMessage(BadPayload):
    """A message of secure aggregation is not valid; its sender drops out of the round."""


@dataclass(frozen=True)
class Advertisement:
    """A client's keys for one round, with commitments to its nonce and to its self-mask seed.

    `identity` is the device's public key in DER. `process` is a random id of the client's process. `signature` is over
    ctx0 and all other fields.
    """

    name: str
    identity: bytes
    process: bytes
    enc: PublicKeys
    mask: PublicKeys
    nonce_commitment: bytes
    self_commitment: bytes
    signature: bytes = b""

    def signed_bytes(self, context0: bytes) -> bytes:
        """Return the bytes that the signature covers."""
        return digest("thinwire secure advertise", context0, self._fields())

    def _fields(self) -> bytes:
        keys = b"".join((self.enc.x25519, self.enc.ml_kem, self.mask.x25519, self.mask.ml_kem))
        head = _with_length(self.name.encode()) + _with_length(self.identity)
        return head + self.process + keys + self.nonce_commitment + self.self_commitment

    def write(self) -> bytes:
        """Return the message's bytes."""
        return self._fields() + _with_length(self.signature)

    @classmethod
    def read(cls, raw: bytes, post_quantum: bool) -> Advertisement:
        """Read a message of this suite."""
        reader = _Reader(raw)
        made = cls._from(reader, post_quantum)
        reader.end()
        return made

    @classmethod
    def _from(cls, reader: _Reader, post_quantum: bool) -> Advertisement:
        name, identity = reader.text(63), reader.sized(MAX_KEY_BYTES)
        if not DEVICE_NAME.fullmatch(name):
            raise BadMessage("an advertisement without a valid device name")
        process = reader.take(PROCESS_BYTES)
        enc, mask = reader.keys(post_quantum), reader.keys(post_quantum)
        return cls(
            name, identity, process, enc, mask, reader.take(HASH_BYTES), reader.take(HASH_BYTES),
            reader.sized(MAX_SIGNATURE_BYTES),
        )  # fmt: skip


@dataclass(frozen=True)
class Roster:
    """The advertisements of all clients of a round (U1), sorted by device name. Index 1 is the first one."""

    clients: tuple[Advertisement, ...]

    def write(self) -> bytes:
        """Return the message's bytes."""
        return struct.pack("<H", len(self.clients)) + b"".join(one.write() for one in self.clients)

    @classmethod
    def read(cls, raw: bytes, post_quantum: bool) -> Roster:
        """Read a message of this suite; names must be sorted and distinct."""
        reader = _Reader(raw)
        clients = tuple(Advertisement._from(reader, post_quantum) for _ in range(reader.u16()))
        reader.end()
        names = [one.name for one in clients]
        if names != sorted(set(names)):
            raise BadMessage("a roster whose names are not sorted, or not distinct")
        return cls(clients)


@dataclass(frozen=True)
class HolderShares:
    """Holds a dealer's part for one holder: the sealed shares, commitments to them, and ciphertexts of ML-KEM.

    A dealer is its own holder too: that entry has commitments and no sealed shares. The ciphertexts are b"" in a
    classical suite and in the own entry.
    """

    holder: int
    root_commitment: bytes
    self_commitment: bytes
    sealed: bytes = b""
    enc_ciphertext: bytes = b""
    mask_ciphertext: bytes = b""

    def associated(self, context1: bytes, dealer: int) -> bytes:
        """Return the associated data of the seal: both ends, the commitments, and the ciphertexts."""
        ends = struct.pack("<HH", dealer, self.holder)
        rest = (self.root_commitment, self.self_commitment, self.enc_ciphertext, self.mask_ciphertext)
        return digest("thinwire secure seal", context1, ends, *rest)

    def write(self) -> bytes:
        """Return the entry's bytes."""
        head = struct.pack("<H", self.holder) + self.root_commitment + self.self_commitment
        return head + b"".join(map(_with_length, (self.sealed, self.enc_ciphertext, self.mask_ciphertext)))

    @classmethod
    def _from(cls, reader: _Reader, dealer: int, post_quantum: bool) -> HolderShares:
        holder, root, own = reader.u16(), reader.take(HASH_BYTES), reader.take(HASH_BYTES)
        made = cls(
            holder,
            root,
            own,
            *(reader.sized(most) for most in (SEALED_BYTES, ML_KEM_CIPHERTEXT_BYTES, ML_KEM_CIPHERTEXT_BYTES)),
        )
        sealed = 0 if holder == dealer else SEALED_BYTES
        ciphertext = ML_KEM_CIPHERTEXT_BYTES if post_quantum and holder != dealer else 0
        if (len(made.sealed), len(made.enc_ciphertext), len(made.mask_ciphertext)) != (sealed, ciphertext, ciphertext):
            raise BadMessage(f"shares for client {holder} have fields of other lengths")
        return made


@dataclass(frozen=True)
class Shares:
    """A client's opened nonce and its shares for each holder, sorted by the holder's index.

    `escrow` holds the secrets of `mask_ciphertext` in the order of the holders, encrypted under the root; it is b"" in
    a classical suite.
    """

    nonce: bytes
    holders: tuple[HolderShares, ...]
    escrow: bytes = b""

    def write(self) -> bytes:
        """Return the message's bytes."""
        rows = b"".join(one.write() for one in self.holders)
        return (
            self.nonce + struct.pack("<H", len(self.holders)) + rows + struct.pack("<I", len(self.escrow)) + self.escrow
        )

    @classmethod
    def read(cls, raw: bytes, dealer: int, holders: Sequence[int], post_quantum: bool) -> Shares:
        """Read the message of a dealer that has these holders, in their order."""
        reader = _Reader(raw)
        nonce, count = reader.take(SECRET_BYTES), reader.u16()
        if count != len(holders):
            raise BadMessage(f"shares for {count} holders", why=f"the graph has {len(holders)}")
        rows = tuple(HolderShares._from(reader, dealer, post_quantum) for _ in range(count))
        if [one.holder for one in rows] != list(holders):
            raise BadMessage("shares for other clients than the graph names")
        escrow = reader.take(reader.u32())
        reader.end()
        if len(escrow) != (SECRET_BYTES * (count - 1) + 16 if post_quantum else 0):
            raise BadMessage(f"an escrow of {len(escrow)} bytes")
        return cls(nonce, rows, escrow)


@dataclass(frozen=True)
class Delivery:
    """The list U2 with all its nonces, and the entries of `Shares` that neighbours in U2 dealt to one client.

    `dealt` is sorted by the dealer's index.
    """

    sharers: tuple[int, ...]
    nonces: tuple[bytes, ...]
    dealt: tuple[tuple[int, HolderShares], ...]

    def write(self) -> bytes:
        """Return the message's bytes."""
        rows = b"".join(struct.pack("<H", dealer) + entry.write() for dealer, entry in self.dealt)
        return index_list(self.sharers) + b"".join(self.nonces) + struct.pack("<H", len(self.dealt)) + rows

    @classmethod
    def read(cls, raw: bytes, me: int, clients: int, post_quantum: bool) -> Delivery:
        """Read the message to the client of index `me`, in a round of `clients` clients."""
        reader = _Reader(raw)
        sharers = reader.indices(clients)
        nonces = tuple(reader.take(SECRET_BYTES) for _ in sharers)
        dealt = list[tuple[int, HolderShares]]()
        for _ in range(reader.u16()):
            dealer = reader.u16()
            dealt.append((dealer, HolderShares._from(reader, dealer, post_quantum)))
            if dealt[-1][1].holder != me or dealer == me:
                raise BadMessage("a delivery with shares for another client")
        reader.end()
        dealers = [dealer for dealer, _ in dealt]
        if dealers != sorted(set(dealers)):
            raise BadMessage("a delivery whose dealers are not sorted, or not distinct")
        return cls(sharers, nonces, tuple(dealt))


@dataclass(frozen=True)
class Survivors:
    """The list U3: the indices of the clients whose masked vectors are in the sum."""

    clients: tuple[int, ...]

    def write(self) -> bytes:
        """Return the message's bytes."""
        return index_list(self.clients)

    @classmethod
    def read(cls, raw: bytes, clients: int) -> Survivors:
        """Read the message of a round of `clients` clients."""
        reader = _Reader(raw)
        made = cls(reader.indices(clients))
        reader.end()
        return made


@dataclass(frozen=True)
class Agreements:
    """The signatures of survivors, by index in rising order."""

    signatures: tuple[tuple[int, bytes], ...]

    def write(self) -> bytes:
        """Return the message's bytes."""
        rows = b"".join(struct.pack("<H", index) + _with_length(signature) for index, signature in self.signatures)
        return struct.pack("<H", len(self.signatures)) + rows

    @classmethod
    def read(cls, raw: bytes, clients: int) -> Agreements:
        """Read the message of a round of `clients` clients; the indices must be distinct."""
        reader = _Reader(raw)
        count = reader.u16()
        if count > clients:
            raise BadMessage(f"{count} signatures of {clients} clients")
        rows = tuple((reader.u16(), reader.sized(MAX_SIGNATURE_BYTES)) for _ in range(count))
        reader.end()
        indices = [index for index, _ in rows]
        if indices != sorted(set(indices)):
            raise BadMessage("signatures that are not sorted by distinct clients")
        return cls(rows)


@dataclass(frozen=True)
class Disclosure:
    """The shares that a client discloses: of each peer it holds either the self-mask share or the root share.

    `shares` has rows (dealer's index, True for the root, share) in rising order of the dealers.
    """

    shares: tuple[tuple[int, bool, bytes], ...]

    def write(self) -> bytes:
        """Return the message's bytes."""
        rows = b"".join(struct.pack("<H?", dealer, is_root) + share for dealer, is_root, share in self.shares)
        return struct.pack("<H", len(self.shares)) + rows

    @classmethod
    def read(cls, raw: bytes, clients: int) -> Disclosure:
        """Read the message of a round of `clients` clients; a dealer has one row at most."""
        reader = _Reader(raw)
        count = reader.u16()
        if count > clients:
            raise BadMessage(f"{count} shares of {clients} clients")
        rows = tuple((reader.u16(), reader.flag(), reader.take(SHARE_BYTES)) for _ in range(count))
        reader.end()
        dealers = [dealer for dealer, _, _ in rows]
        if dealers != sorted(set(dealers)):
            raise BadMessage("shares that are not sorted by distinct dealers")
        return cls(rows)


def max_bytes(phase: Phase, clients: int, post_quantum: bool) -> int:
    """Return the largest size of a client's message in a phase, in bytes, but for the masked vectors."""
    kem = ML_KEM_CIPHERTEXT_BYTES if post_quantum else 0
    match phase:
        case "advertise":
            keys = 2 * (32 + (ML_KEM_PUBLIC_BYTES if post_quantum else 0))
            return 63 + MAX_KEY_BYTES + PROCESS_BYTES + keys + 2 * HASH_BYTES + MAX_SIGNATURE_BYTES + 6
        case "share":
            entry = 2 + 2 * HASH_BYTES + SEALED_BYTES + 2 * kem + 6
            return SECRET_BYTES + 6 + clients * entry + (SECRET_BYTES * clients + 16 if post_quantum else 0)
        case "agree":
            return MAX_SIGNATURE_BYTES
        case "unmask":
            return 2 + clients * (3 + SHARE_BYTES)
    return 0


def _with_length(field: bytes) -> bytes:
    return struct.pack("<H", len(field)) + field


class _Reader:
    """Reads fields one after the other; every failure is a `BadMessage`."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > len(self._raw) - self._at:
            raise BadMessage("a message that is too short")
        self._at += count
        return self._raw[self._at - count : self._at]

    def u16(self) -> int:
        """Return the next unsigned 16-bit integer."""
        return int.from_bytes(self.take(2), "little")

    def u32(self) -> int:
        """Return the next unsigned 32-bit integer."""
        return int.from_bytes(self.take(4), "little")

    def flag(self) -> bool:
        """Return the next byte, which is 0 or 1."""
        if (value := self.take(1)[0]) > 1:
            raise BadMessage(f"a flag with the value {value}")
        return bool(value)

    def sized(self, most: int) -> bytes:
        """Return the next field with a length of 16 bits, of at most `most` bytes."""
        if (length := self.u16()) > most:
            raise BadMessage(f"a field of {length} bytes", why=f"it may have {most}")
        return self.take(length)

    def text(self, most: int) -> str:
        """Return the next field as ASCII text."""
        try:
            return self.sized(most).decode("ascii")
        except UnicodeDecodeError:
            raise BadMessage("a name that is not ASCII") from None

    def keys(self, post_quantum: bool) -> PublicKeys:
        """Return the next pair's public keys, which must be those of the suite."""
        ml_kem = ML_KEM_PUBLIC_BYTES if post_quantum else 0
        return PublicKeys(self.take(32), self.take(ml_kem))

    def indices(self, clients: int) -> tuple[int, ...]:
        """Return the next list of indices, which rise from 1 or more to `clients` or less."""
        count = self.u16()
        if count > clients:
            raise BadMessage(f"a list of {count} clients", why=f"the round has {clients}")
        found = struct.unpack(f"<{count}H", self.take(2 * count))
        if any(a >= b for a, b in zip((0, *found), (*found, clients + 1), strict=False)):
            raise BadMessage("a list of clients that does not rise, or names a client outside of the round")
        return found

    def end(self) -> None:
        """Require that nothing follows."""
        if self._at != len(self._raw):
            raise BadMessage(f"{len(self._raw) - self._at} bytes after the end of a message")
