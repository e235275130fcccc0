"""This module stores the results of simulated runs as files: a group of runs is a directory, a finished run a cell in
it.

A cell is `DIGEST.json`, named by the digest of everything that its figures depend on, and replaced as a whole. So an
interrupted sweep continues where it stopped, several sweeps may work on one group, and the files can be copied,
committed and compared elsewhere. A file `*.requested` lists the digests of the cells that a sweep will make.

Groups are files and not rows of the store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.store.read_models import RoundRow, RunRow

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
FORMAT = 2
AGAIN = "remove it: the sweep makes it again"


@dataclass(frozen=True)
class TrialSpec:
    """Holds everything that a cell's figures depend on, except this program's version."""

    plan: dict[str, Any]  # resolved
    clients: int
    split: str
    data: str  # the named path, "" if there was none
    task_digest: str  # of the task's source
    code_digest: str = ""  # of other code of the user that it depends on (simulation/sweep.py), "" if there is none

    @property
    def digest(self) -> str:
        """Return the cell's name: twenty hex digits of SHA-256."""
        from thinwire.core.plan import canonical

        values = dataclasses.asdict(self)
        if not self.code_digest:  # cells from before this field keep their names
            del values["code_digest"]
        return hashlib.sha256(canonical(values)).hexdigest()[:20]


@dataclass(frozen=True)
class CellRound:
    """Holds one round's figures: bytes of all clients together, and `seconds` as if the clients worked in parallel
    without a link.
    """

    reason: str
    selected: int
    seconds: float
    payload_up: int
    payload_down: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Trial:
    """Holds a finished run; `took_s` is measured on this machine's clock, with one thread at work.

    `failures` names for the first failed assignments the client, and the place in the task.
    """

    made: TrialSpec
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
    payload_down: int | None = None  # of the whole run, with the last model's evaluation; None in older files
    failures: list[str] = field(default_factory=list)
    payload_up: int | None = None  # of a stored run, as its row has them; None: the sums of its rounds
    seconds: float | None = None

    @classmethod
    def of(
        cls, made: TrialSpec, run: RunRow, rounds: list[RoundRow], took_s: float = 0.0, failures: Sequence[str] = ()
    ) -> Trial:
        """Return the cell of a run that is over, from its rows."""
        told = [
            CellRound(r.reason, len(r.selected), r.seconds or 0.0, r.payload_up, r.payload_down, dict(r.metrics))
            for r in rounds
        ]
        return cls(
            made, run.status, run.status_text, run.exit_code, run.size, dict(run.metrics), dict(run.metrics0),
            run.dense_up, run.dense_down, told, took_s, run.payload_down, list(failures),
        )  # fmt: skip

    @property
    def plan(self) -> RunPlan:
        """Return the run's plan."""
        from thinwire.core.plan import RunPlan

        return RunPlan.from_json(self.made.plan)

    def to_json(self) -> dict[str, Any]:
        """Return the cell as JSON values, with the format's number."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Trial:
        """Read a cell; raise KeyError, TypeError or ValueError if the values are not a cell."""
        said = dict(raw)
        if said.pop("format") != FORMAT:
            raise ValueError("a cell of another version")
        rounds = [CellRound(**one) for one in said.pop("rounds")]
        return cls(made=TrialSpec(**said.pop("made")), rounds=rounds, **said)


@dataclass(frozen=True)
class TrialStore:
    """Reads and writes the cells of one group's directory."""

    folder: Path

    @classmethod
    def named(cls, sweeps: Path, name: str) -> TrialStore:
        """Return the group of this name; raise UsageError if the name is not valid."""
        if not NAME.fullmatch(name):
            why = "it names a folder: letters, digits, -, _ and ., at most 63"
            raise UsageError(f"a group has no valid name: {name!r}", why=why, hint="--name codecs")
        return cls(sweeps / name)

    def keep(self, cell: Trial) -> None:
        """Write a cell durably; it replaces an existing one, which has the same content or failed."""
        private_folder(self.folder)
        text = json.dumps(cell.to_json(), sort_keys=True, separators=(",", ":"))
        write_atomically(self.folder / f"{cell.made.digest}.json", text.encode() + b"\n")

    def request(self, digests: Iterable[str]) -> None:
        """Note the cells that a sweep will make, so that a list of groups can show how many are missing."""
        private_folder(self.folder)
        text = "".join(f"{digest}\n" for digest in sorted(digests)).encode()
        write_atomically(self.folder / f"{hashlib.sha256(text).hexdigest()[:20]}.requested", text)

    def all(self) -> dict[str, Trial]:
        """Return the finished cells by digest; raise `DataLost` with the name of a file that is not a cell."""
        return {path.stem: _read(path) for path in sorted(self.folder.glob("*.json"))}

    def found(self) -> dict[str, Trial]:
        """Return the finished cells by digest; raise `NotFound`, with the groups that exist, if there are none."""
        if cells := self.all():
            return cells
        near = sorted(path.parent.name for path in self.folder.parent.glob("*/*.json"))
        known = ", ".join(dict.fromkeys(near)) or "none"
        raise NotFound(
            f"there is no group {self.folder.name!r}",
            why=f"groups with a finished run: {known}",
            hint=f"thinwire sim PLAN --sweep KEY=A|B --name {self.folder.name}",
        )


def _read(path: Path) -> Trial:
    try:
        cell = Trial.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataLost(f"{path} is no finished run", why=str(error), hint=AGAIN) from error
    if cell.made.digest != path.stem:
        raise DataLost(f"{path} is not what its name says", why="it was changed", hint=AGAIN)
    return cell


@dataclass(frozen=True)
class Group:
    """Holds a group's progress: `done` of `runs` noted or finished runs; `at` is the wall-clock time of the last
    write.
    """

    name: str
    task: str
    done: int
    runs: int
    at: float


def groups(sweeps: Path) -> list[Group]:
    """Return all groups in a directory, the latest first.

    Cells are counted and not read, because a group may have thousands.
    """
    found = [_group(folder) for folder in sweeps.iterdir() if folder.is_dir()] if sweeps.is_dir() else []
    return sorted((group for group in found if group.runs), key=lambda group: (-group.at, group.name))


def _group(folder: Path) -> Group:
    done = {path.stem: path for path in folder.glob("*.json")}
    requested = {digest for path in folder.glob("*.requested") for digest in path.read_text().split()}
    times = [path.stat().st_mtime for path in [*done.values(), *folder.glob("*.requested")]]
    return Group(folder.name, _task(done), len(done), len(requested | done.keys()), max(times, default=0.0))


def _task(done: dict[str, Path]) -> str:
    """Return the task's name from the first readable cell; "" if there is none."""
    for path in done.values():
        try:
            return str(json.loads(path.read_bytes())["made"]["plan"]["run"]["task"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""
