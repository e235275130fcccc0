"""Seconds to one accuracy where links are unequal: the ladder of codecs against the best single codec found after.

    python -m benchmarks.links [--preset small|full] --json

Eight clients, one on each of 1, 5, 20 and 100 Mb/s with 20 ms and with 200 ms of round trip, share the digits by
dirichlet(0.3) and train the MLP on a virtual clock. Its 9 610 parameters stand for a hundred times as many: each byte
counts for a hundred, and a step and an encoding take a hundred times what they were measured to take on this machine
first. A link's bandwidth wavers from assignment to assignment (log-normally, sigma 0.2). All runs have `deadline_s =
"auto"`. The target is 0.98 of the accuracy that the least compressed codec ends with.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any

from benchmarks.costs import Costs, add_option, measured
from benchmarks.curve import Curve, Devices, curve
from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.stragglers import PARAMETERS, SHARE, SPLIT, TASK
from thinwire.client.task import load_task
from thinwire.core import Key, RunPlan
from thinwire.core.events import ClientSelected, RoundOpened, UpdateAccepted
from thinwire.core.prng import derive
from thinwire.core.types import Assignment
from thinwire.simulation import Behavior, LogNormal, ScriptedDevice, Training

LINKS = tuple(product((1.0, 5.0, 20.0, 100.0), (0.02, 0.2)))  # (Mb/s, seconds of a round trip)
SIZE = 100  # one byte and one step of the MLP stand for so many
WAVERS = 0.2
LADDER = ("fp16", "int8", "topk(0.1) > int8", "topk(0.02) > int8")
ALL = "ladder"
STEPS, LR = 20, 0.1
NEVER_S = 1e9  # stands for "not in this run", so that it can be compared


@dataclass(frozen=True)
class Preset:
    seeds: int
    rounds: int


PRESETS = {"tiny": Preset(1, 3), "small": Preset(2, 20), "full": Preset(5, 20)}


def plan_of(uplink: str, rounds: int, seed: int) -> RunPlan:
    """Return the plan with the codec of the updates: one for all, or each device's rung of the ladder."""
    codec = {"ladder": list(LADDER)} if uplink == ALL else {"codec": uplink}
    return RunPlan.from_json({
        "run": {"task": "digits", "rounds": rounds, "seed": seed, "evaluate": "off", "keep": "all"},
        "cohort": {"wait_for": len(LINKS), "deadline_s": "auto"},
        "local": {"lr": LR, "steps": STEPS},
        "uplink": {**codec, "feedback": "classic"},
        "downlink": {"codec": "int8"},
    })  # fmt: skip


def devices_of(costs: Costs, seed: int) -> Devices:
    """Return one client for each link; costs are this machine's."""

    def device(training: Training, index: int, mbps: float, rtt_s: float) -> ScriptedDevice:
        byte_s = LogNormal(8 * SIZE / (mbps * 1e6), WAVERS)

        def script(assignment: Assignment) -> Behavior:
            down, up = (byte_s.at(derive(Key(seed), way, assignment.assignment_id)) for way in ("down", "up"))
            taken_s = rtt_s + down * sum(part.length for part in assignment.parts)
            return Behavior(taken_s, 0.0, SIZE * costs.encode_s, lambda size: rtt_s + up * size)

        work = training.client(index, lambda assignment: SIZE * costs.step_s)
        return ScriptedDevice(training.population.name(index), work, script)

    return lambda training: [device(training, index, *link) for index, link in enumerate(LINKS)]


def measure(preset: Preset, costs: Costs, workers: int) -> list[dict[str, Any]]:
    """Return one row for each codec and seed; seeds side by side, to the same figures."""
    cells, rows = [(preset.rounds, costs, seed) for seed in range(1, preset.seeds + 1)], list[dict[str, Any]]()
    if preset.seeds == 1:  # sooner here than other processes have imported torch
        return [row for cell in cells for row in told(measure_seed(*cell))]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(measure_seed, *zip(*cells, strict=True)):
            rows += told(found)
    return rows


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    note("; ".join(f"{row['uplink']} {row['seconds'] or NEVER_S:.0f} s" for row in rows))
    return rows


def measure_seed(rounds: int, costs: Costs, seed: int) -> list[dict[str, Any]]:
    task, devices = load_task(TASK), devices_of(costs, seed)
    found = {u: curve(plan_of(u, rounds, seed), task, SPLIT, len(LINKS), devices) for u in (*LADDER, ALL)}
    least_compressed = found[LADDER[0]]
    target = SHARE * least_compressed.late_accuracy(least_compressed.updates)
    return [{"seed": seed, **row_of(uplink, one, target)} for uplink, one in found.items()]


def row_of(uplink: str, one: Curve, target: float) -> dict[str, Any]:
    selected = Counter(codec for event in one.events if isinstance(event, RoundOpened) for codec in _codecs(event))
    assignments = {
        assignment_id
        for event in one.events
        if isinstance(event, RoundOpened)
        for assignment_id in event.assignments.values()
    }
    assignments |= {event.assignment_id for event in one.events if isinstance(event, ClientSelected)}
    in_time = sum(isinstance(event, UpdateAccepted) and not event.late for event in one.events)
    return {
        "uplink": uplink, "target": target, "seconds": one.seconds_to(target),
        "accuracy": one.late_accuracy(one.updates), "round_s": one.points[-1].seconds / len(one.points),
        "in_time_share": in_time / len(assignments), "selected": dict(selected),
    }  # fmt: skip


def _codecs(event: RoundOpened) -> list[str]:
    return list(event.codecs.values()) or [event.codec] * len(event.assignments)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over seeds; the best codec is the one that is there first in the median."""
    seconds = {
        uplink: [row["seconds"] or NEVER_S for row in rows if row["uplink"] == uplink] for uplink in (*LADDER, ALL)
    }
    best = min(LADDER, key=lambda codec: median(seconds[codec]))
    ladder = [row for row in rows if row["uplink"] == ALL]
    found = {f"seconds {uplink}": median(each) for uplink, each in seconds.items()}
    found["speedup"] = median(one / own for one, own in zip(seconds[best], seconds[ALL], strict=True))
    found["in_time_share"] = fmean(row["in_time_share"] for row in ladder)
    return found


def main() -> None:
    parser = arguments("links", __doc__, PRESETS)
    add_option(parser)
    given = parser.parse_args()
    end_what_we_started()
    costs = Costs.of(given.costs) if given.costs else measured(TASK, plan_of("int8", 1, 1), PARAMETERS)
    note(f"{costs}; here {SIZE} times that")
    rows = measure(PRESETS[given.preset], costs, len(os.sched_getaffinity(0)))
    show(document("links", given.preset, rows, {**figures(rows), **costs.figures()}), given.json)


if __name__ == "__main__":
    main()
