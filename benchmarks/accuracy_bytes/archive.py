"""The raw runs behind the tables, as they are committed: a line a cell, and what was decided from them.

    python -m benchmarks.accuracy_bytes.archive FOLDER

keeps what stands in a folder of the full preset; the full preset begins with what is kept. So nobody has to spend the
hours again to check a decision, and a run that was cut off goes on in another checkout. A line holds what decisions
follow from (accuracies and bytes of each round), not what differs from machine to machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.accuracy_bytes.reading import METRIC
from benchmarks.document import note
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.reports.sweep_results import CellRound, Trial, TrialSpec, TrialStore

KEPT = Path(__file__).parents[2] / "docs" / "evidence" / "cells"
DIGITS = 10  # of an accuracy: far more than decisions look at
DECIDED, MEASURED = "decisions", "measured"


def keep(folder: Path, model: str, kept: Path = KEPT) -> int:
    """Write all finished cells of a model, its decisions and what was measured alone; gives how many cells."""
    done = sorted((cell for cell in TrialStore(folder / model).all().values() if cell.status == "done"), key=_order)
    kept.mkdir(parents=True, exist_ok=True)
    write_atomically(kept / f"{model}.jsonl", "".join(f"{line(cell)}\n" for cell in done).encode())
    beside = {
        part: {path.stem: json.loads(path.read_text()) for path in sorted((folder / model / part).glob("*.json"))}
        for part in (DECIDED, MEASURED)
    }
    write_atomically(kept / f"{model}.json", json.dumps(beside, indent=1).encode() + b"\n")
    return len(done)


def restore(folder: Path, model: str, kept: Path = KEPT) -> int:
    """Put into a folder what is kept and not there yet; gives how many cells."""
    lines, beside = kept / f"{model}.jsonl", kept / f"{model}.json"
    if not lines.exists():
        return 0
    cells, there = TrialStore(folder / model), 0
    known = {cell.made.digest for cell in cells.all().values()}
    for cell in map(restored, lines.read_text().splitlines()):
        if cell.made.digest not in known:
            cells.keep(cell)
            there += 1
    for part, documents in json.loads(beside.read_text()).items():
        for name, document in documents.items():
            path = folder / model / part / f"{name}.json"
            if not path.exists():
                private_folder(path.parent)
                write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
    return there


def line(cell: Trial) -> str:
    """One cell; a column whose rounds are all alike is one value."""
    columns: dict[str, list[Any]] = {
        "selected": [one.selected for one in cell.rounds],
        "up": [one.payload_up for one in cell.rounds],
        "down": [one.payload_down for one in cell.rounds],
        "accuracy": [_accuracy(one.metrics) for one in cell.rounds],
    }
    told = {
        "made": dataclasses.asdict(cell.made), "size": cell.size, "dense": [cell.dense_up, cell.dense_down],
        "rounds": len(cell.rounds), "final": _accuracy(cell.metrics), "took_s": round(cell.took_s, 2),
        **{name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()},
    }  # fmt: skip
    return json.dumps(told, sort_keys=True, separators=(",", ":"))


def restored(text: str) -> Trial:
    """
    >>> made = TrialSpec({"run": {}}, 20, "iid", "", "digest")
    >>> cell = Trial(made, "done", "", 0, 10, {METRIC: 0.5}, {}, 40, 40, [CellRound("all", 4, 0.0, 9, 40, {})] * 2)
    >>> restored(line(cell)) == cell
    True
    """
    told: dict[str, Any] = json.loads(text)
    count = told["rounds"]
    columns = zip(*(_column(told[name], count) for name in ("selected", "up", "down", "accuracy")), strict=True)
    rounds = [CellRound("all", selected, 0.0, up, down, _metrics(accuracy)) for selected, up, down, accuracy in columns]
    dense_up, dense_down = told["dense"]
    return Trial(
        TrialSpec(**told["made"]), "done", "", 0, told["size"], _metrics(told["final"]), {}, dense_up, dense_down,
        rounds, told["took_s"],
    )  # fmt: skip


def _order(cell: Trial) -> tuple[str, str]:
    """Cells of one trial stand together, whenever they were made."""
    plan = cell.made.plan
    return f"{plan['uplink']} {plan['local']} {plan['downlink']}", f"{plan['run']['seed']:>6} {cell.made.digest}"


def _column(value: Any, count: int) -> Iterable[Any]:
    return value if isinstance(value, list) else [value] * count


def _accuracy(metrics: dict[str, float]) -> float | None:
    return round(metrics[METRIC], DIGITS) if METRIC in metrics else None


def _metrics(accuracy: float | None) -> dict[str, float]:
    return {} if accuracy is None else {METRIC: accuracy}


def models(folder: Path) -> Iterator[str]:
    """Those that a folder has cells of."""
    return (path.name for path in sorted(folder.iterdir()) if path.is_dir())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_bytes.archive", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the full preset")
    chosen = parser.parse_args()
    for name in models(chosen.folder):
        note(f"{name}: {keep(chosen.folder, name)} cells are kept in {KEPT}")
