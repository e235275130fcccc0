"""The secrets that clients disclose in `unmask` are on no disk of the aggregator, wherever it is killed.

Its files are searched at each commit and sync from the first disclosed share on: the journal with its write-ahead log,
the messages of phases, the spool and all others. Where the messages of `unmask` are stored, the same search finds them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.server.test_secure_rounds import World
from tests.support.crashes import Fate, Killed
from tests.support.planted import Search, files_of
from tests.support.secure_fleet import SecureBehavior, toy_plan
from thinwire.core import RunPlan
from thinwire.core.run_events import SumUnmasked
from thinwire.core.types import PhaseReply, phase_of
from thinwire.privacy.messages import HASH_BYTES, Disclosure
from thinwire.privacy.secure_round import SecureRound
from thinwire.server import secure_round_runner
from thinwire.server.secure_round_runner import SecureRoundRunner

CLIENTS, IDENTITY = 5, b"\x5e" * 8  # of the run, which the store has as text


def forms(value: bytes) -> tuple[bytes, ...]:
    """The bytes by which a value would be found in a file: as it is, in hex, and in base64 wherever it begins."""
    aligned = (base64.b64encode(bytes(before) + value)[4:-4] for before in range(3))
    return value, value.hex().encode(), str(int.from_bytes(value, "big")).encode(), *aligned


@dataclass
class Looking(Fate):
    """Searches the aggregator's files wherever it may be killed; `dies` says in which moment it is, once."""

    folder: Path = Path()
    dies: str = ""
    secrets: dict[str, bytes] = field(default_factory=dict)  # that were disclosed or rebuilt
    known: dict[str, bytes] = field(default_factory=lambda: {"identity": IDENTITY})  # of this the files do have some
    found: set[str] = field(default_factory=set)

    def here(self, place: str) -> None:
        self.look()
        super().here(place)

    def look(self) -> None:
        if any(name.startswith("share") for name in self.secrets):
            search = Search({name: forms(value) for name, value in (self.secrets | self.known).items()})
            self.found |= {name for blob in files_of(self.folder) for name in search.in_blob(blob)}

    def dies_when(self, moment: str) -> None:
        if self.dies == moment:
            self.dies = ""
            self.look()
            raise Killed(moment)


@pytest.fixture
def fate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Looking]:
    """What a run of five devices discloses is noted, and searched for."""
    made, take, rebuild = Looking(folder=tmp_path), SecureRoundRunner.on_message, SecureRound._reconstruct

    def taken(self: SecureRoundRunner, reply: PhaseReply) -> None:
        phase, message = phase_of(reply.assignment_id), base64.b64decode(reply.message)
        if phase == "share":
            made.known["nonce"] = message[:HASH_BYTES]
        shares = Disclosure.read(message, CLIENTS).shares if phase == "unmask" else ()
        made.secrets |= {f"share {reply.device} {dealer}": share for dealer, _, share in shares}
        take(self, reply)
        if phase == "unmask":
            made.dies_when("while shares arrive")

    def rebuilt(self: SecureRound, dealer: int, is_root: bool) -> bytes:
        seed = rebuild(self, dealer, is_root)
        made.secrets[f"{'root' if is_root else 'seed'} {dealer}"] = seed
        made.dies_when("while masks are removed")
        return seed

    monkeypatch.setattr(SecureRoundRunner, "on_message", taken)
    monkeypatch.setattr(SecureRound, "_reconstruct", rebuilt)
    yield made


class OneRound(World):
    """One round, in which "d" drops out after its shares, so that its root is disclosed too."""

    rounds = RunPlan.parse(toy_plan("bits = 12\nclip = 20.0\nmax_dropout = 0.4", rounds=1))

    def behavior_of(self, name: str):  # a Script
        return lambda assignment: SecureBehavior(silent="masked" if name == "d" else None)


@pytest.mark.parametrize("dies", ["while shares arrive", "while masks are removed"])
def test_no_disclosed_share_or_seed_is_on_the_disk(fate: Looking, tmp_path: Path, dies: str) -> None:
    fate.dies = dies
    made = OneRound(tmp_path, fate).live()
    assert [e.survivors for e in made.of(SumUnmasked)] == [4]
    assert fate.dies == "", "it was killed"
    assert {name.split()[0] for name in fate.secrets} == {"share", "seed", "root"}
    assert fate.found == {"identity", "nonce"}, "the search sees the store and the messages of earlier phases"


def test_the_search_finds_what_would_be_stored(fate: Looking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_round_runner, "STORED_PHASES", (*secure_round_runner.STORED_PHASES, "unmask"))
    OneRound(tmp_path, fate).live()
    disclosed = {name.split()[1] for name in fate.found if name.startswith("share")}
    assert disclosed == {"a", "b", "c"}, "the masks are removed with those of the first three devices"
