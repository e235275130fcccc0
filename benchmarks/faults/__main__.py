"""What breaks in a run of real processes, what that loses, doubles or changes, and how soon the run goes on.

    python -m benchmarks.faults [--preset small|full] [--only FAULT] [--patient] --json

An aggregator, two devices and the digits, behind a gate that lets answers in one by one in the order of rounds and
devices (tests/system/gate.py). Each fault strikes at moments that a seed draws. `lost_updates` are accepted answers
that were neither folded nor given back, `double_folds` asks that stand in the model more than once, `identical_share`
the share of versions whose model, optimizer's state and shadow have the bits of the undisturbed run, where the fault
keeps the order of answers. Recovery counts from the start of the new process: an aggregator's until both devices are
connected to it, a device's until it can be asked. `recoveries_s` has it for other faults too, from where they are
mended.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.faults.breaking import Case, cases, on_a_small_disk
from benchmarks.processes import free_port
from tests.system.gated import DEVICES, Gated, gated_run
from tests.system.moments import drawn
from tests.system.outcome import double_folds, identical_share, lost_updates
from tests.system.processes import Site
from thinwire.core.events import Event

SEED = 20261122


@dataclass(frozen=True)
class Preset:
    """`kills` of the aggregator, `strikes` of each other fault, in runs of so many rounds. `patient`: devices do not
    notice that nobody listens for a while, and so need not come back by and by.
    """

    rounds: int
    kills: int
    strikes: int
    patient: bool = False


PRESETS = {"tiny": Preset(2, 1, 1), "small": Preset(4, 6, 2), "full": Preset(8, 20, 3)}


def measure(preset: Preset, folder: Path, only: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    undisturbed = made(folder / "undisturbed", preset, Case(cases()["aggregator killed"].fault), 0).events
    rows = list[dict[str, Any]]()
    for name, case in cases().items():
        if only and name not in only:
            continue
        count = (preset.kills if name == "aggregator killed" else preset.strikes) if case.strikes else 0
        home = folder / name.replace(" ", "-").replace("'", "")
        home.mkdir()
        with on_a_small_disk(home / "home", case.disk) as reason:
            if reason:
                row: dict[str, Any] = {"fault": name, "skipped": reason}
            else:
                row = row_of(name, preset, case, made(home, preset, case, count), undisturbed)
        rows.append(row)
        note(f"{name}: {row}")
    return rows, figures(rows)


def made(folder: Path, preset: Preset, case: Case, count: int) -> Gated:
    folder.mkdir(exist_ok=True)
    site = Site(folder / "home")
    if case.page:
        site.page = ("--page", f"127.0.0.1:{free_port()}")
    moments = drawn(count, max(1, preset.rounds - 1), DEVICES, SEED)  # the last round shows that it goes on
    try:
        return gated_run(site, preset.rounds, moments, case.fault, patient=preset.patient)
    finally:
        site.close()


def row_of(name: str, preset: Preset, case: Case, run: Gated, undisturbed: Sequence[Event]) -> dict[str, Any]:
    return {
        "fault": name,
        "struck": run.struck,
        "late": run.late,
        "patient": preset.patient,
        "lost_updates": lost_updates(run.events),
        "double_folds": double_folds(run.events),
        "identical_share": identical_share(run.events, undisturbed) if case.identical else None,
        "who": case.who,
        "recovery_s": max(run.recovered_s) if case.who and run.recovered_s else None,
        "recoveries_s": [round(seconds, 3) for seconds in run.recovered_s],
    }


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums and worst cases over what was measured."""
    there = [row for row in rows if "skipped" not in row]
    shares = [row["identical_share"] for row in there if row["identical_share"] is not None]
    found: dict[str, float] = {
        "faults": len(there),
        "lost_updates": sum(row["lost_updates"] for row in there),
        "double_folds": sum(row["double_folds"] for row in there),
    }
    if shares:
        found["identical_share"] = min(shares)
    for who in ("aggregator", "device"):
        if worst := [row["recovery_s"] for row in there if row["who"] == who and row["recovery_s"] is not None]:
            found[f"{who}_max_recovery_s"] = max(worst)
    if recovered := [seconds for name, seconds in found.items() if name.endswith("_max_recovery_s")]:
        found["max_recovery_s"] = max(recovered)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--only", action="append", choices=list(cases()), default=[], help="measure this fault alone")
    parser.add_argument("--patient", action="store_true", help="keep connections while the aggregator is down")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started ends with us
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-", ignore_cleanup_errors=True) as folder:
        preset = replace(PRESETS[chosen.preset], patient=chosen.patient)
        rows, found = measure(preset, Path(folder), chosen.only)
    show(document("faults", chosen.preset, rows, found), chosen.json)


if __name__ == "__main__":
    main()
