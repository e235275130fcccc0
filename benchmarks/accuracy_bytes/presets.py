"""Small: ten minutes, and decides nothing. Full: hours, resumable, and what is committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy_bytes import archive
from benchmarks.accuracy_bytes.evidence import part
from benchmarks.accuracy_bytes.lab import Lab
from benchmarks.accuracy_bytes.models import BASELINES, FULL, Model, Seeds, smaller
from benchmarks.accuracy_bytes.planned import hours
from benchmarks.accuracy_bytes.protocol import Protocol, Rates
from benchmarks.accuracy_bytes.times import round_seconds
from benchmarks.accuracy_bytes.trials import Chain
from benchmarks.document import note
from thinwire.core.statedir import private_folder, write_atomically

SMALL = {
    "digits": smaller(FULL["digits"], Seeds(rounds=1, rates=1, early=2, a=4, b=10, sweep=0), 3, 2, most=50),
    "cnn": smaller(FULL["cnn"], Seeds(rounds=1, rates=1, early=1, a=2, b=2, sweep=0), 2, 2, most=10),
    "code_lm": smaller(FULL["code_lm"], Seeds(rounds=1, rates=1, early=1, a=2, b=2, sweep=0), 2, 1, most=4),
}
RESULT = "accuracy-bytes.json"


@dataclass(frozen=True)
class Runs:
    """The models of one preset in one folder. `decides`: whether its figures are the ones that count; `kept`: where
    runs that need not be made again are.
    """

    models: dict[str, Model]
    folder: Path
    workers: int
    decides: bool
    command: str
    kept: Path | None = None

    def all(self) -> dict[str, Any]:
        """Each model from where it stands to its end; the document is written before, and after each of them."""
        document: dict[str, Any] = {"decides": self.decides, "models": {}}
        for name in self.models:
            if self.kept and (there := archive.restore(self.folder, name, self.kept)):
                note(f"{name}: {there} runs that are committed are not made again")
            protocol = self._protocol(name)
            if (about_h := hours(protocol)) is not None:
                note(f"{name}: {about_h:.1f} hours of {self.workers} free cores in all, finished runs among them")
            document["models"][name] = {"reason": _reason(protocol)}
        for name in self.models:
            self._write(document)
            document["models"][name] = self.one(name)
        self._write(document)
        return document

    def one(self, name: str) -> dict[str, Any]:
        protocol = self._protocol(name)
        rounds = protocol.rounds()
        rates = protocol.rates(rounds.rounds)
        selected = protocol.selection(rounds.rounds, rates)
        found = protocol.conclusion(rounds.rounds, rates, selected)
        early = protocol.early(rounds.rounds, rates)
        told_of = [*BASELINES, *(one.chain for one in selected.finalists), *protocol.model.beside]
        seconds = self.times(name, rates | protocol.beside(rounds.rounds), told_of)
        return part(protocol, rounds, rates, early, selected, found, seconds, self.command)

    def _protocol(self, name: str) -> Protocol:
        return Protocol(self.models[name], Lab(self.folder, self.workers))

    def _write(self, document: dict[str, Any]) -> None:
        private_folder(self.folder)
        write_atomically(self.folder / RESULT, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")

    def times(self, name: str, rates: Rates, chains: Sequence[Chain]) -> dict[Chain, float]:
        """Seconds of a round, measured once for each chain: with nothing else running, or they say too much."""
        path = self.folder / name / "measured" / "round-seconds.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        missing = {chain: rates[chain] for chain in chains if chain.name not in known}
        if missing:
            found = round_seconds(self.models[name].work, missing)
            known |= {chain.name: seconds for chain, seconds in found.items()}
            private_folder(path.parent)
            write_atomically(path, json.dumps(known, indent=1).encode() + b"\n")
        return {chain: known[chain.name] for chain in chains}


def _reason(protocol: Protocol) -> str:
    """Why there is no figure yet: how far its decisions have come."""
    decided = protocol.decisions.all()
    steps = [step for step in ("rounds", "rates", "staying", "selection", "conclusion") if step in decided]
    return "its full run has not finished: " + (
        f"decided so far: {', '.join(steps)}" if steps else "nothing is decided"
    )
