"""The tables of the privacy ledger: its entries, who took part in them, and their sums.

They outlive the runs that they are about, so they have no foreign key to one. `store/privacy_ledger.py` writes the
entries and the participants, and `store/privacy_devices.py` the sums.

Invariant: entries are only added, so nothing that was spent is ever taken back.
"""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.store.database import Base, Counter, Words


class PrivacyEntry(Base):
    """Holds an entry of the privacy ledger (store/privacy_ledger.py). Rows are only added, and outlive their run.

    `release` is the JSON of a noised release, and `count` how many of it are spent. `state` is one of STATES there.
    """

    __tablename__ = "privacy_ledger"
    __table_args__ = (Index(None, "population"), Index(None, "run_id", "round"))

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    at: Mapped[float]
    population: Mapped[str] = mapped_column(Words(255))
    run_id: Mapped[str] = mapped_column(String(80), default="")  # no foreign key
    round: Mapped[int] = mapped_column(Integer, default=0)
    release: Mapped[str] = mapped_column(Text, default="")
    count: Mapped[int] = mapped_column(default=1)
    digest: Mapped[str] = mapped_column(String(64), default="")  # of the released bytes
    who: Mapped[str] = mapped_column(default="")  # settled it


class PrivacyParticipant(Base):
    """Holds a device that was selected for a release; `device` is its key's fingerprint, in a simulation its name."""

    __tablename__ = "privacy_participants"

    entry: Mapped[int] = mapped_column(ForeignKey("privacy_ledger.id"), primary_key=True)
    device: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)


class PrivacySpent(Base):
    """Holds the sums of the privacy ledger: how many of each release a device has spent of each population.

    `device` is that of PrivacyParticipant, or "" for releases that everyone in the population spends.

    Invariant: at every commit `count` is the sum over the entries of the ledger.
    """

    __tablename__ = "privacy_spent"

    population: Mapped[str] = mapped_column(Words(255), primary_key=True)
    device: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    release: Mapped[str] = mapped_column(Text, primary_key=True)
    count: Mapped[int]
