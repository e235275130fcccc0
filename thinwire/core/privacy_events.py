"""These events are the privacy ledger's part of the journal: what a noised release costs is reserved, then committed.

A release is described by JSON (`Release` of privacy/accounting.py), from which its cost is computed. The reservation is
journalled in the transaction that opens its round, before an assignment leaves. It stays spent whatever becomes of the
round: there is no event that takes it back. The commit is journalled in the transaction that closes the round, with the
digest of the released bytes, so that a resume releases the same bytes and never draws noise again.

They stand apart from `core/events.py`, whose events every run has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.events import Event


@dataclass(frozen=True)
class PrivacyReserved(Event):
    """Reports that a noised release is spent; it is journalled in the transaction that opens its round.

    - `round`: its number, from 1.
    - `population`: the clients of which each one's data is protected; the ledger is kept by it, not by the run.
    - `release`: the JSON of the release. Its text is compared: one release has one text.
    - `devices`: the names of the selected devices. None of them is removed if it drops out.
    - `elapsed_s`: seconds since the run began.

    A round may reserve several releases. Raise ValueError for a reservation of nobody's data, or of nothing.
    """

    round: int
    population: str
    release: str
    devices: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.population or not self.release:
            raise ValueError(f"a reservation names a population and a release: {self.population!r}, {self.release!r}")


@dataclass(frozen=True)
class PrivacyCommitted(Event):
    """Reports that the release of a round is made; it is journalled in the transaction that closes the round.

    - `round`: its number, from 1.
    - `digest`: the SHA-256 of the released bytes.
    """

    round: int
    digest: str
