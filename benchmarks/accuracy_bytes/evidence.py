"""What is committed: one small document with every figure of the tables, and none of the cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from benchmarks.accuracy_bytes.bound import MARGIN, Paired, paired
from benchmarks.accuracy_bytes.conclusion import Conclusion
from benchmarks.accuracy_bytes.decisions import plain
from benchmarks.accuracy_bytes.lab import Found
from benchmarks.accuracy_bytes.links import to_target
from benchmarks.accuracy_bytes.protocol import Protocol, Rates, payload_up, ratio
from benchmarks.accuracy_bytes.reading import accuracies, mean_curve
from benchmarks.accuracy_bytes.rounds import Rounds
from benchmarks.accuracy_bytes.selection import Judged, Selected
from benchmarks.accuracy_bytes.trials import CLIENTS, FP32, PARTICIPATION, Chain, Trial
from benchmarks.document import machine
from thinwire.reports.sweep_results import Trial as Cell

POINTS = 24  # of a curve that is committed
FEW = 5  # seeds
BELOW = 1.0  # points: the target is what fp32 reaches on tuning seeds, less so many, rounded down


def part(
    protocol: Protocol, rounds: Rounds, rates: Rates, early: Sequence[Judged], selected: Selected, found: Conclusion,
    times: Mapping[Chain, float], command: str,
) -> dict[str, Any]:  # fmt: skip
    """All that is told of one model whose outcome is there."""
    model, rates = protocol.model, rates | protocol.beside(rounds.rounds)
    told_of = [*(one.chain for one in selected.finalists), *model.beside]
    on_a = protocol.on_a(rounds.rounds, rates, told_of)
    on_b = protocol.on_b(rounds.rounds, rates, _on_b(selected, found))
    decided = protocol.decisions.all()["conclusion"]
    target = float(int(fp32_on_tuning(protocol, rounds) - BELOW))
    return {
        "params": next(iter(on_b.values()))[0].size,
        "clients": CLIENTS, "split": model.work.split, "participation": PARTICIPATION,
        "steps": model.work.steps, "batch": model.work.batch, "seeds": plain(model.seeds),
        "rounds": plain(rounds), "grid": list(model.rates), "rates": plain(dict(rates)),
        "first_of_a": plain(list(early)), "selection": plain(selected), "conclusion": plain(found),
        "a": [row(chain, cells, on_a) for chain, cells in by_chain(on_a).items()],
        "b": [row(chain, cells, on_b) for chain, cells in by_chain(on_b).items()],
        "to_target": {chain.name: plain(to_target(cells, target, times[chain]))
                      for chain, cells in by_chain(on_a).items() if chain in times},
        "round_seconds": plain(dict(times)),
        "curves": {chain.name: thinned(cells, by_chain(on_a)[FP32]) for chain, cells in by_chain(on_a).items()},
        "beside": [chain.name for chain in model.beside],
        "factors": factors(protocol.factors(rounds.rounds, rates, told_of)),
        "round_trip": round_trip(protocol.round_trip(rounds.rounds, rates, selected.chain), on_a),
        "command": command, "commit": decided["commit"], "at": decided["at"], "machine": machine(),
    }  # fmt: skip


def fp32_on_tuning(protocol: Protocol, rounds: Rounds) -> float:
    """Points of fp32 in the last rounds on tuning seeds: the target must not look at seeds B."""
    model = protocol.model
    horizon = next(one for one in model.horizons if one >= rounds.rounds)
    trial = Trial(model.work, FP32, rounds.rate, horizon)
    found = protocol.lab.cells(model.work, [trial], model.seeds.tuning(model.seeds.rounds), "fp32")[trial]
    curve = mean_curve(found)
    last = [value for number, value in curve.items() if 3 * rounds.rounds < 4 * number <= 4 * rounds.rounds]
    return fmean(last or curve.values())


def by_chain(found: Found) -> dict[Chain, list[Cell]]:
    return {trial.chain: cells for trial, cells in found.items()}


def row(chain: Chain, cells: Sequence[Cell], beside: Found) -> dict[str, Any]:
    """One chain on its seeds: accuracy in points, bytes of one client in one round, and its difference to fp32."""
    fp32, points = by_chain(beside)[FP32], accuracies(cells)
    selected = sum(one.selected for cell in cells for one in cell.rounds)
    told = {
        "chain": chain, "seeds": len(cells), "accuracy": fmean(points),
        "accuracy_sd": stdev(points) if len(points) > 1 else 0.0,
        "bytes_up": payload_up(cells) / selected,
        "bytes_down": sum(one.payload_down for cell in cells for one in cell.rounds) / selected,
        "bits_per_param": 8 * payload_up(cells) / selected / cells[0].size,
        "ratio": ratio(cells, fp32), "difference": paired(points, accuracies(fp32)),
    }  # fmt: skip
    return {name: plain(value) for name, value in told.items()}


def thinned(cells: Sequence[Cell], fp32: Sequence[Cell]) -> list[dict[str, float]]:
    """The mean over seeds at some rounds: bytes up so far of all clients, points, and the gap to fp32."""
    mean, other = mean_curve(cells), mean_curve(fp32)
    sums = [list(accumulate(one.payload_up for one in cell.rounds)) for cell in cells]
    measured = [number for number in mean if number in other]
    step = max(1, len(measured) // POINTS)
    chosen = sorted({*measured[step - 1 :: step], *measured[-1:]})
    return [
        {
            "round": number, "bytes_up": round(fmean(sent[number - 1] for sent in sums)),
            "accuracy": round(mean[number], 3), "gap": round(mean[number] - other[number], 3),
        }
        for number in chosen
    ]  # fmt: skip


def factors(found: Found) -> list[dict[str, Any]]:
    """Each finalist against fp32 where one thing differs from the centre."""
    rows = []
    for trial, cells in found.items():
        fp32 = next(
            other for one, other in found.items()
            if one.chain == FP32 and replace(one, chain=trial.chain, rate=trial.rate) == trial
        )  # fmt: skip
        if trial.chain != FP32:
            told = {
                "split": trial.split or trial.work.split, "participation": trial.participation,
                "clients": trial.clients, "chain": trial.chain,
                "fp32": fmean(accuracies(fp32)), "difference": paired(accuracies(cells), accuracies(fp32)),
                "ratio": ratio(cells, fp32),
            }  # fmt: skip
            rows.append(plain(told))
    return rows


def round_trip(found: Found, beside: Found) -> dict[str, Any]:
    """Bytes both ways of fp32 over those of the selected chain with each downlink; which of them cost no accuracy."""
    if not found:
        return {"rows": [], "best": None, "why": "this version's plans refuse a codec in the downlink"}
    fp32 = by_chain(beside)[FP32][: len(next(iter(found.values())))]  # of the same seeds, which are the first of A
    rows: list[dict[str, Any]] = [
        {
            "down": chain.down, "ratio": both_ways(fp32) / both_ways(cells),
            "difference": paired(accuracies(cells), accuracies(fp32)),
        }
        for chain, cells in by_chain(found).items()
    ]  # fmt: skip
    good = [one for one in rows if _costs_nothing(one["difference"])]
    best = max(good, key=lambda one: float(one["ratio"]), default=None)
    return {
        "rows": plain(rows),
        "best": plain(best),
        "why": "" if best else "none is non-inferior on the first seeds A",
    }


def _costs_nothing(found: Paired) -> bool:
    """By the bound; by the mean where the seeds are too few for one."""
    return found.non_inferior or (found.seeds < FEW and found.mean > -MARGIN)


def both_ways(cells: Sequence[Cell]) -> int:
    return sum(one.payload_up + one.payload_down for cell in cells for one in cell.rounds)


def _on_b(selected: Selected, found: Conclusion) -> list[Chain]:
    """The chains that were run on B: the selected one, and what took its place."""
    other = [found.chain] if found.chain is not None else []
    return list(dict.fromkeys([selected.chain, *other]))
