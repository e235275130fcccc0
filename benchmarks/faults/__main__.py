"""Measure what breaks in a run of real processes, what that loses, doubles or changes, and how soon the run goes on.

    python -m benchmarks.faults [--preset small|full] [--only FAULT] [--patient] --json

An aggregator, two devices and the digits, behind a gate that lets answers in one by one in the order of rounds and
devices (tests/support/gate.py). Each fault strikes at moments that a seed draws, and is fixed when it has cost what it
is to cost: `struck` counts the strikes, `met` those of them that did. A frozen device sleeps until its round has closed
without it, a worker is killed while it trains, an upload is cut where some of its bytes are at the aggregator and not
all, a full disk stays full until somebody has met it. A row of which no strike has met its aim has `failed`.

`lost_updates` are accepted answers that were neither aggregated nor given back, `double_aggregations` assignments that
stand in the model more than once, `unanswered` assignments of which no answer counted, `late_answers` those that came
in a later round. `identical_share` is the share of versions that are as in a run without the fault: the bits of model,
optimizer's state and replica, which deadlines passed, what was accepted in which order, what was aggregated and what
was given back (run_outcome.py). Where a fault costs answers, that run takes in the same: its devices fail the same
assignments, or begin at a residual of zero there, and the gate holds the same answers until their deadline has passed
(tests/support/alike.py). Where there is no such run `identical_why` says why. `late` counts strikes whose drawn moment
had passed before it was waited for.

`max_recovery_s` counts from the start of the new process, with all that it imports and all that others wait: an
aggregator's until the interrupted run goes on, by the first answer that it takes or round that it opens (or until the
next kill, which strikes at something that goes on); a device's until an answer of the new process is taken, with the
start of the process that trains and the training. `recoveries_s` has it for other faults too, from their mending.

Each thing that is waited for ends after 90 s with a sentence; the fault is then `failed` in its row, the others are
measured, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.faults.cases import Case, cases
from benchmarks.faults.judged import Judge
from tests.support.small_disk import small_disk, why_not


@dataclass(frozen=True)
class Preset:
    """`kills` of the aggregator and half as many of a device, `strikes` of each other fault. `rounds` are those of runs
    in which strikes come close together.
    """

    rounds: int
    kills: int
    strikes: int

    def count(self, name: str, case: Case) -> int:
        """Return how often a fault strikes."""
        found = {"aggregator killed": self.kills, "device killed": max(1, self.kills // 2)}
        return found.get(name, self.strikes) if case.strikes else 0


PRESETS = {"tiny": Preset(2, 1, 1), "small": Preset(4, 6, 2), "full": Preset(8, 20, 3)}


def measure(
    preset: Preset, folder: Path, only: Sequence[str], patient: bool
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    judge = Judge(folder, patient)
    chosen = {name: case for name, case in cases().items() if not only or name in only}
    rows = [row_of(name, preset, case, judge) for name, case in chosen.items()]
    return rows, figures(rows)


def row_of(name: str, preset: Preset, case: Case, judge: Judge) -> dict[str, Any]:
    """Return the row of a fault: its effects, why it was `skipped`, or what did not come to an end in its time."""
    home = judge.folder / name.replace(" ", "-").replace("'", "")
    home.mkdir()
    rounds, moments = case.moments(preset.rounds, preset.count(name, case))
    with on_a_small_disk(home / "home", case.disk) as reason:
        if reason:
            row: dict[str, Any] = {"fault": name, "skipped": reason}
        else:
            try:
                row = judge.row(name, case, rounds, moments, home)
            except AssertionError as error:
                note(str(error))
                row = {"fault": name, "failed": str(error).partition("\n")[0]}
    note(f"{name}: {row}")
    return row


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums and worst cases over what was measured."""
    there = [row for row in rows if not {"skipped", "failed"} & row.keys()]
    shares = [row["identical_share"] for row in there if row["identical_share"] is not None]
    found: dict[str, float] = {
        "faults": len(there),
        "failed": sum("failed" in row for row in rows),
        "struck": sum(row["struck"] for row in there),
        "met": sum(row["met"] for row in there),
        "lost_updates": sum(row["lost_updates"] for row in there),
        "double_aggregations": sum(row["double_aggregations"] for row in there),
    }
    if shares:
        found["identical_share"] = min(shares)
    for who in ("aggregator", "device"):
        if worst := [row["recovery_s"] for row in there if row["who"] == who and row["recovery_s"] is not None]:
            found[f"{who}_max_recovery_s"] = max(worst)
    if recovered := [seconds for name, seconds in found.items() if name.endswith("_max_recovery_s")]:
        found["max_recovery_s"] = max(recovered)
    return found


@contextlib.contextmanager
def on_a_small_disk(home: Path, folder: str) -> Iterator[str]:
    """Mount a small disk on the folder in this block; yield "", or why it failed. Without a folder nothing is done."""
    if not folder:
        yield ""
    elif reason := why_not(home.parent / "try"):
        yield reason
    else:
        with small_disk(home / folder):
            yield ""


def main() -> None:
    parser = arguments("faults", __doc__, PRESETS)
    parser.add_argument("--only", action="append", choices=list(cases()), default=[], help="measure this fault alone")
    parser.add_argument("--patient", action="store_true", help="keep connections while the aggregator is down")
    given = parser.parse_args()
    end_what_we_started()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-", ignore_cleanup_errors=True) as folder:
        rows, found = measure(PRESETS[given.preset], Path(folder), given.only, given.patient)
    show(document("faults", given.preset, rows, found), given.json)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
