"""What accuracy each codec costs, and how many bytes it saves.

python -m benchmarks.accuracy_bytes --preset committed --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.accuracy_bytes.lab import Lab
from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.protocol import Protocol


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_bytes", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", default=",".join(FULL))
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    for name in chosen.models.split(","):
        protocol = Protocol(FULL[name], Lab(chosen.folder, chosen.workers))
        rounds = protocol.rounds().rounds
        rates = protocol.rates(rounds)
        selected = protocol.selection(rounds, rates)
        protocol.verdict(rounds, rates, selected)
        protocol.factors(rounds, rates, [one.chain for one in selected.finalists])


if __name__ == "__main__":
    main()
