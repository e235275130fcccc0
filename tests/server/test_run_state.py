"""The state of a run does not grow with the number of its rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_bench import Bench, every, work
from thinwire.core.events import RoundClosed
from thinwire.core.plan import RunPlan
from thinwire.core.types import Assignment
from thinwire.server.state.run_state import empty_state
from thinwire.simulation import Behavior, ScriptedDevice

EARLY = 21
NEVER = {"metric": "loss", "value": -1.0}
MODES: dict[str, tuple[int, dict[str, Any]]] = {  # rounds, sections of the plan
    "late replies": (70, {"cohort": {"deadline_s": 4}}),
    "buffered": (56, {"cohort": {"mode": "buffered", "buffer": 2, "deadline_s": 9}}),
    "pipelined": (56, {"local": {"lr": 1.0, "overlap": {"max_delay": 1}}, "cohort": {"deadline_s": 9}}),
    "compressed downlink": (56, {"downlink": {"codec": "int8", "log_rounds": 8}, "cohort": {"deadline_s": 9}}),
}


def sometimes_slow(assignment: Assignment) -> Behavior:
    return Behavior(compute_s=6.0 if assignment.round % 7 == 0 else 1.0)


def contained(value: object) -> int:
    """Return how many objects a state holds, itself included."""
    if is_dataclass(value) and not isinstance(value, type):
        return 1 + sum(contained(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, Mapping):
        return 1 + sum(contained(key) + contained(one) for key, one in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return 1 + sum(map(contained, value))
    return 1


@pytest.mark.parametrize(("rounds", "sections"), MODES.values(), ids=MODES)
def test_a_state_holds_after_many_rounds_as_much_as_after_21(
    tmp_path: Path, rounds: int, sections: dict[str, Any]
) -> None:
    overlaps, scripts = "local" in sections, {"a": every(1.0), "b": every(1.2), "c": sometimes_slow}
    devices = [ScriptedDevice(name, work(name), script, overlaps=overlaps) for name, script in scripts.items()]
    bench = Bench(tmp_path, devices, run={"rounds": rounds, "target": NEVER}, **sections)
    assert bench.drive().status == "done"
    state, held = empty_state(RunPlan.from_json(bench.store.run(bench.run_id).plan)), list[int]()
    for _, event in bench.store.events(bench.run_id):
        state.apply(event)
        if isinstance(event, RoundClosed) and event.round % 7 == 1:  # the round after one of them opened, always alike
            held.append(contained(state))
    early = held[EARLY // 7 : EARLY // 7 + 5]
    assert min(early) <= held[-1] <= max(early)
