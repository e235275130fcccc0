"""A group of simulated runs as files: one cell a run, kept once it is over, found again by what it was made of.

A group is a folder; a cell is `DIGEST.json` in it, replaced as a whole. So a sweep that was cut off goes on where it
was, several of them may work at one group, and its files can be copied, committed and compared elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.core.plan import RunPlan, canonical
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.store.read_models import RoundRow, RunRow

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
FORMAT = 1
AGAIN = "remove it: the sweep makes it anew"


@dataclass(frozen=True)
class Made:
    """What a cell is made of: all that its figures depend on but this program's version."""

    plan: dict[str, Any]  # resolved
    clients: int
    split: str
    data: str  # the place that was named, "" where none was
    task_digest: str  # of the task's source

    @property
    def digest(self) -> str:
        """Twenty hex digits of SHA-256: the cell's name."""
        return hashlib.sha256(canonical(dataclasses.asdict(self))).hexdigest()[:20]


@dataclass(frozen=True)
class CellRound:
    """One round's figures: bytes of all clients together, `seconds` as if they worked side by side, without a wire."""

    reason: str
    asked: int
    seconds: float
    payload_up: int
    payload_down: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Cell:
    """A run that is over. `took_s`: on this machine's clock, of which one thread worked."""

    made: Made
    status: str
    status_text: str
    exit_code: int
    size: int
    metrics: dict[str, float]
    metrics0: dict[str, float]
    dense_up: int
    dense_down: int
    rounds: list[CellRound]
    took_s: float = 0.0
    payload_down: int | None = None  # of the whole run, with the last model's measuring; None in older files

    @classmethod
    def of(cls, made: Made, run: RunRow, rounds: list[RoundRow], took_s: float = 0.0) -> Cell:
        told = [
            CellRound(r.reason, len(r.asked), r.seconds or 0.0, r.payload_up, r.payload_down, dict(r.metrics))
            for r in rounds
        ]
        return cls(
            made, run.status, run.status_text, run.exit_code, run.size, dict(run.metrics), dict(run.metrics0),
            run.dense_up, run.dense_down, told, took_s, run.payload_down,
        )  # fmt: skip

    @property
    def plan(self) -> RunPlan:
        return RunPlan.from_json(self.made.plan)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Cell:
        """Raises KeyError, TypeError or ValueError where it is no cell."""
        said = dict(raw)
        if said.pop("format") != FORMAT:
            raise ValueError("a cell of another version")
        rounds = [CellRound(**one) for one in said.pop("rounds")]
        return cls(made=Made(**said.pop("made")), rounds=rounds, **said)


@dataclass(frozen=True)
class Cells:
    """The cells of one group's folder."""

    folder: Path

    @classmethod
    def named(cls, sweeps: Path, name: str) -> Cells:
        if not NAME.fullmatch(name):
            why = "it names a folder: letters, digits, -, _ and ., at most 63"
            raise UsageError(f"a group cannot be called {name!r}", why=why, hint="--name codecs")
        return cls(sweeps / name)

    def keep(self, cell: Cell) -> None:
        """Write it durably; a cell that is there already is replaced by the same one."""
        private_folder(self.folder)
        text = json.dumps(cell.to_json(), sort_keys=True, separators=(",", ":"))
        write_atomically(self.folder / f"{cell.made.digest}.json", text.encode() + b"\n")

    def ask(self, digests: Iterable[str]) -> None:
        """Note what a sweep is to make, so that whoever lists groups can say how much of it is missing."""
        private_folder(self.folder)
        text = "".join(f"{digest}\n" for digest in sorted(digests)).encode()
        write_atomically(self.folder / f"{hashlib.sha256(text).hexdigest()[:20]}.asked", text)

    def all(self) -> dict[str, Cell]:
        """The finished cells by digest; `DataLost` names a file that is none."""
        return {path.stem: _read(path) for path in sorted(self.folder.glob("*.json"))}

    def found(self) -> dict[str, Cell]:
        """The same; `NotFound` where there are none, with the groups that there are."""
        if cells := self.all():
            return cells
        near = sorted(path.parent.name for path in self.folder.parent.glob("*/*.json"))
        known = ", ".join(dict.fromkeys(near)) or "none"
        raise NotFound(
            f"there is no group {self.folder.name!r}",
            why=f"groups with a finished run: {known}",
            hint=f"thinwire sim PLAN --sweep KEY=A|B --name {self.folder.name}",
        )


def _read(path: Path) -> Cell:
    try:
        cell = Cell.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataLost(
            f"{path} is no finished run", why=str(error), hint="remove it: the sweep makes it anew"
        ) from error
    if cell.made.digest != path.stem:
        raise DataLost(
            f"{path} is not what its name says", why="it was changed", hint="remove it: the sweep makes it anew"
        )
    return cell


# The groups of simulated runs, and how much of each is made: they are files, and no rows of the store.


@dataclass(frozen=True)
class Group:
    """`done` of `runs` that were ever asked for are over; `at` is when the last of them was kept, on the wall clock."""

    name: str
    task: str
    done: int
    runs: int
    at: float


def groups(sweeps: Path) -> list[Group]:
    """All groups under a folder, the latest first. Cells are counted, not read: a group may have thousands."""
    found = [_group(folder) for folder in sweeps.iterdir() if folder.is_dir()] if sweeps.is_dir() else []
    return sorted((group for group in found if group.runs), key=lambda group: (-group.at, group.name))


def _group(folder: Path) -> Group:
    done = {path.stem: path for path in folder.glob("*.json")}
    asked = {digest for path in folder.glob("*.asked") for digest in path.read_text().split()}
    times = [path.stat().st_mtime for path in [*done.values(), *folder.glob("*.asked")]]
    return Group(folder.name, _task(done), len(done), len(asked | done.keys()), max(times, default=0.0))


def _task(done: dict[str, Path]) -> str:
    """The task's name as one of the cells says it; "" where none does."""
    for path in done.values():
        try:
            return str(json.loads(path.read_bytes())["made"]["plan"]["run"]["task"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""
