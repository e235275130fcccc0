"""What breaks in a run of real processes, what that loses, doubles or changes, and how soon the run goes on.

    python -m benchmarks.faults [--preset small|full] [--only FAULT] [--patient] --json

An aggregator, two devices and the digits, behind a gate that lets answers in one by one in the order of rounds and
devices (tests/system/gate.py). Each fault strikes at moments that a seed draws. `lost_updates` are accepted answers
that were neither folded nor given back, `double_folds` asks that stand in the model more than once, `identical_share`
the share of versions that are as in the undisturbed run: the bits of model, optimizer's state and shadow, the closing
reason, what was accepted in which order, what was folded and what was given back (tests/system/outcome.py). Only where
the fault keeps the order of answers: else other rounds are made, and there is no undisturbed run to compare with.
`late` counts strikes whose drawn moment had passed before it was waited for, since the run had gone on while the one
before was mended: they strike at once.

`max_recovery_s` counts from the start of the new process, with all that it imports and all that others wait: an
aggregator's until the interrupted run goes on, by the first answer that it takes or round that it opens (or until the
next kill, which strikes at something that goes on); a device's until an answer of the new process is taken, with the
start of the process that trains and the training. `recoveries_s` has it for other faults too, from their mending.

Each thing that is waited for ends after 90 s with a sentence; the fault is then `failed` in its row, the others are
measured, and the exit code is 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.faults.breaking import Case, cases, on_a_small_disk
from benchmarks.processes import free_port
from tests.system.gated import DEVICES, Gated, gated_run
from tests.system.moments import drawn, spaced
from tests.system.outcome import double_folds, identical_share, lost_updates
from tests.system.processes import THE_DEMOS, Site
from thinwire.core.events import Event

SEED = 20261122


@dataclass(frozen=True)
class Preset:
    """`kills` of the aggregator and half as many of a device, `strikes` of each other fault. `rounds` are those of the
    runs that are compared with the undisturbed one. `patient`: devices do not notice that nobody listens for a while,
    and so need not come back by and by.
    """

    rounds: int
    kills: int
    strikes: int
    patient: bool = False

    def count(self, name: str, case: Case) -> int:
        """How often a fault strikes."""
        found = {"aggregator killed": self.kills, "device killed": max(1, self.kills // 2)}
        return found.get(name, self.strikes) if case.strikes else 0


PRESETS = {"tiny": Preset(2, 1, 1), "small": Preset(4, 6, 2), "full": Preset(8, 20, 3)}


def measure(preset: Preset, folder: Path, only: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    undisturbed = made(folder / "undisturbed", preset, cases()["aggregator killed"], "undisturbed", 0).events
    chosen = {name: case for name, case in cases().items() if not only or name in only}
    rows = [row_of(name, preset, case, folder, undisturbed) for name, case in chosen.items()]
    return rows, figures(rows)


def made(folder: Path, preset: Preset, case: Case, name: str, count: int) -> Gated:
    folder.mkdir(exist_ok=True)
    site = Site(folder / "home")
    site.example = THE_DEMOS
    if case.page:
        site.page = ("--page", f"127.0.0.1:{free_port()}")
    if case.identical or not count:
        rounds, moments = preset.rounds, drawn(count, max(1, preset.rounds - 1), DEVICES, SEED)
    else:
        rounds, moments = 2 * count, spaced(count, DEVICES, SEED)
    began = time.monotonic()

    def tell(line: str) -> None:
        note(f"{time.monotonic() - began:6.1f} s  {name}: {line}")

    tell(f"a run of {rounds} rounds begins")
    try:
        return gated_run(site, rounds, moments, case.fault, patient=preset.patient, tell=tell)
    finally:
        site.close()


def row_of(name: str, preset: Preset, case: Case, folder: Path, undisturbed: Sequence[Event]) -> dict[str, Any]:
    """What came of a fault; why it was `skipped`, or what did not come to an end in its time."""
    home = folder / name.replace(" ", "-").replace("'", "")
    home.mkdir()
    with on_a_small_disk(home / "home", case.disk) as reason:
        if reason:
            row: dict[str, Any] = {"fault": name, "skipped": reason}
        else:
            try:
                row = told(name, preset, case, made(home, preset, case, name, preset.count(name, case)), undisturbed)
            except AssertionError as error:
                note(str(error))
                row = {"fault": name, "failed": str(error).partition("\n")[0]}
    note(f"{name}: {row}")
    return row


def told(name: str, preset: Preset, case: Case, run: Gated, undisturbed: Sequence[Event]) -> dict[str, Any]:
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
        "load": os.getloadavg()[0],  # of all that ran here: seconds beside others say little
    }


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums and worst cases over what was measured."""
    there = [row for row in rows if not {"skipped", "failed"} & row.keys()]
    shares = [row["identical_share"] for row in there if row["identical_share"] is not None]
    found: dict[str, float] = {
        "faults": len(there),
        "failed": sum("failed" in row for row in rows),
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
    parser = arguments("faults", __doc__, PRESETS)
    parser.add_argument("--only", action="append", choices=list(cases()), default=[], help="measure this fault alone")
    parser.add_argument("--patient", action="store_true", help="keep connections while the aggregator is down")
    given = parser.parse_args()
    end_what_we_started()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-", ignore_cleanup_errors=True) as folder:
        preset = replace(PRESETS[given.preset], patient=given.patient)
        rows, found = measure(preset, Path(folder), given.only)
    show(document("faults", given.preset, rows, found), given.json)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
