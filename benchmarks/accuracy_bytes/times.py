"""The seconds of a round by itself: what clients compute and the server adds, without a wire and without neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks.accuracy_bytes.trials import Chain, Trial, Work
from thinwire.client.task import load_task
from thinwire.simulation.sweep import run_trial

ROUNDS, WARM = 8, 2
SEED = 1


def round_seconds(work: Work, rates: Mapping[Chain, float]) -> dict[Chain, float]:
    """The median of a few rounds of each chain; run this with nothing else on the machine."""
    digest = load_task(work.task).source_digest
    found = {}
    for chain, rate in rates.items():
        cell = run_trial(work.task, Trial(work, chain, rate, ROUNDS).made(SEED, digest))
        found[chain] = median(one.seconds for one in cell.rounds[WARM:])
    return found
