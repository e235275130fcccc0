"""An audit of the noise: what an attacker shows of epsilon by guessing, where epsilon 1 is claimed.

    python -m benchmarks.privacy_audit [--preset tiny|small|full] --json

The bounds are those of `benchmarks.one_run_audit`, each with 95 % confidence. Each canary is a client whose update is a
unit vector of its own coordinate, with the length of the clip. If its coin is False, its update is zero. The attacker
sees the released sum, and its score of a client is that client's coordinate. The number of guesses is fixed above all
runs, from simulated Gaussians. The code is that of the product: `noise_plan` finds the noise for the claim, and

- `central` is a `PrivateSum`, which clips and rounds each update and adds one draw of noise;
- `distributed` is a `PrivateLattice`: clients round, rotate and add their part of the noise. In a sum are the fewest
  honest clients for which the plan counts. The others subtracted their noise or left: no sum of a round has less noise.
  Masks are left out: they leave no trace in a sum.

`audited_lower` must be below the claim, `audited_lower_without_noise` above it. With half the noise (a standard
deviation half as large) the bound is above the claim on average, by about three of its own standard deviations. The
figures of the lattice end in `_distributed`. Presets below full share the canaries among many sums: each client is in
one of them, so its epsilon is the same. The lattice is audited in two ways: by many sums of 800 clients, as runs have
them, and by one sum of all canaries, whose figures end in `_one_lattice`. In the full preset the latter takes half an
hour: 300 000 vectors of 131 072 coordinates, 5.5 ms each.

`run_audited_lower` is the largest bound of attacks on the released models of real runs, which have a claim of their own
(`benchmarks.audited_run`). It must be below that claim. Nothing follows from how far: so few clients can show little.
`run_audited_lower_without_noise` is what the same attack shows without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.audited_run import attacked_run, summary
from benchmarks.document import note
from benchmarks.entry import run_in_folder
from benchmarks.one_run_audit import lower_bound, right_guesses
from thinwire.aggregation.lattice import Lattice
from thinwire.aggregation.plan_codecs import lattice_of
from thinwire.aggregation.private_lattice import PrivateLattice, PrivateSum
from thinwire.core import Key, RunPlan
from thinwire.core.types import SecureWork, Vector
from thinwire.privacy.noise_plan import NoisePlan, noise_plan
from thinwire.privacy.secret_rng import SystemRng

EPSILON, DELTA, CLIP = 1.0, 5e-6, 1.0
GUESSES = 2000  # of 100 000 canaries; simulated: 0.53 +- 0.05 with the noise claimed, 1.17 +- 0.05 with half
NOISE = (1.0, 0.5, 0.0)  # standard deviations, in multiples of what the claim needs
NAMES = {1.0: "audited_lower", 0.5: "audited_lower_half_noise", 0.0: "audited_lower_without_noise"}
ONE = "one sum"
Attacks = Sequence[tuple[str, int, int, bool]]  # (mode, clients, rounds, whether it has noise)


@dataclass(frozen=True)
class Preset:
    """`central` and `distributed`: how many sums, and the clients of each. `lattice`: clients of a sum of its own."""

    central: tuple[int, int]
    distributed: tuple[int, int]
    lattice: int
    runs: Attacks

    @property
    def sums(self) -> list[tuple[str, int, int]]:
        """Return each audit: mode, number of sums, and the clients of each."""
        return [("central", *self.central), ("distributed", *self.distributed), ("distributed", 1, self.lattice)]


PRESETS = {
    "tiny": Preset((100, 1000), (5, 1000), 2500, ()),
    "small": Preset(
        (10, 10_000),
        (125, 1000),
        5000,
        (("central", 60, 10, True), ("central", 60, 10, False), ("distributed", 20, 10, True)),
    ),
    "full": Preset(
        (1, 100_000),
        (125, 1000),
        125_000,  # of which 100 000 count
        (("central", 200, 20, True), ("central", 200, 20, False), ("distributed", 20, 20, True)),
    ),
}


def plan_of(mode: str, clients: int) -> RunPlan:
    """Return a plan of one round at the claim."""
    secure = {"enabled": True, "max_corrupt": 0.1, "max_dropout": 0.1} if mode == "distributed" else {}
    return RunPlan.from_json({
        "run": {"task": "audit", "rounds": 1, "evaluate": "off"},
        "cohort": {"clients": clients, "deadline_s": 60, "late": "drop"},
        "local": {"lr": 1.0, "steps": 1, "buffers": "local"},
        "uplink": {"codec": "identity"} if mode == "central" else {},
        "secure": secure,
        "privacy": {"mode": mode, "clip": CLIP, "target_epsilon": EPSILON, "delta": DELTA},
    })  # fmt: skip


def canaries(included: NDArray[np.bool_], size: int) -> Callable[[int], Vector]:
    """Return a function that writes the update of a client: its own unit vector, or zeros."""
    update, last = np.zeros(size, np.float32), 0

    def of(client: int) -> Vector:
        nonlocal last
        update[last] = 0.0
        last = client
        update[client] = CLIP * included[client]
        return update

    return of


def central_scores(included: NDArray[np.bool_], rng: SystemRng) -> dict[float, Vector]:
    """Return what is released of one sum with each amount of noise. The exact sum is made once, as it takes longest."""
    clients = included.size
    noise = noise_plan(plan_of("central", clients), clients, clients)
    exact, update = PrivateSum(clients, CLIP, noise.scale, clients, rng), canaries(included, clients)
    for client in np.flatnonzero(included):  # an update of zeros adds zeros
        exact.add(update(int(client)))
    assert exact.total is not None, "it was not released"
    found = {}
    for factor in NOISE:
        fresh = PrivateSum(clients, CLIP, noise.scale, clients, rng)
        fresh.total = exact.total.copy()
        found[factor] = fresh.release(drawing(scaled(noise, factor), rng))
    return found


def scaled(noise: NoisePlan, factor: float) -> NoisePlan:
    """Return the plan with so much of the noise's standard deviation."""
    return replace(noise, variance=noise.variance * factor**2)


def drawing(noise: NoisePlan, rng: SystemRng) -> Callable[[NDArray[np.int32]], None]:
    """Return how a sum draws its noise; a variance of 0 draws none."""
    if noise.variance == 0:
        return lambda out: out.fill(0)
    return lambda out: noise.sampler.fill(out, rng)


def distributed_scores(included: NDArray[np.bool_], selected: int, rng: SystemRng) -> dict[float, Vector]:
    """Return the decoded sum of the honest survivors with each amount of noise."""
    plan, survivors = plan_of("distributed", selected), included.size
    found = {}
    for factor in NOISE:
        made = lattice_of(plan, survivors, SecureWork(selected, 0, CLIP), "audit")
        assert isinstance(made, PrivateLattice), "the plan says so"
        assert made.noise.release.parties == survivors, "so many for which the claim counts"
        made.noise = scaled(made.noise, factor)
        total, rotation = (
            np.zeros(made.lanes, made.dtype),
            Key(*np.frombuffer(rng.random_bytes(16), np.uint64).tolist()),
        )
        update = canaries(included, survivors)
        for client in range(survivors):
            x = update(client).copy()
            encode = made.encode if factor else partial(Lattice.encode, made)  # the latter rounds, and adds no noise
            points = encode(x, 1, 0, rotation, rng)
            total += points.lanes
        found[factor] = made.decode_sum(total, survivors, survivors, 0, rotation)
    return found


def audit(mode: str, sums: int, clients: int) -> list[dict[str, Any]]:
    """Return a row for each amount of noise."""
    rng = SystemRng()
    size = clients if mode == "central" else noise_plan(plan_of(mode, clients), 1024, clients).release.parties
    coins, scores = [], [[] for _ in NOISE]  # type: list[NDArray[np.bool_]], list[list[Vector]]
    for _ in range(sums):
        coins.append(np.frombuffer(rng.random_bytes(size), np.uint8) < 128)
        made = central_scores(coins[-1], rng) if mode == "central" else distributed_scores(coins[-1], clients, rng)
        for factor, found in zip(NOISE, scores, strict=True):
            found.append(made[factor])
    rows, included = [], np.concatenate(coins)
    guesses = max(2, round(GUESSES * min(1.0, included.size / 1e5)) // 2 * 2)
    for factor, found in zip(NOISE, scores, strict=True):
        right = right_guesses(np.concatenate(found), included, guesses)
        lower = lower_bound(included.size, guesses, right, DELTA)
        note(f"{mode}, {factor:g} of the noise: {right} of {guesses} right, epsilon is at least {lower:.3f}")
        rows.append({
            "mode": mode, "attack": ONE if sums == 1 else f"{sums} sums", "noise": factor,
            "canaries": included.size, "claimed_epsilon": EPSILON, "delta": DELTA, "guesses": guesses, "right": right,
            "audited_lower": lower,
        })  # fmt: skip
    return rows


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Audit both sums, and attack the runs."""
    del folder  # all of it is in memory
    rows = [row for mode, *size in preset.sums for row in audit(mode, *size)]
    for seed, (mode, clients, rounds, noised) in enumerate(preset.runs, 1):
        rows.append(attacked_run(mode, clients, rounds, seed, noised))
        note(f"{rounds} rounds, {mode}: {rows[-1]['right']} of {rows[-1]['guesses']} right")
    return rows, figures(rows)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bounds by name."""
    found = {"claimed_epsilon": EPSILON}
    attacks = [row for row in rows if row["attack"] == "released models"]
    for row in rows:
        if row not in attacks:
            one = "_one_lattice" if row["attack"] == ONE else "_distributed"
            found[NAMES[row["noise"]] + one * (row["mode"] == "distributed")] = row["audited_lower"]
    return found | (summary(attacks) if attacks else {})


if __name__ == "__main__":
    run_in_folder("privacy_audit", __doc__, PRESETS, measure)
