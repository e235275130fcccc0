"""What a client's tasks are, kept on disk: a start that finds nothing changed needs no torch to say hello."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from thinwire.aggregation import codecs
from thinwire.core.errors import DataLost
from thinwire.core.fleet import TaskReport
from thinwire.core.home import write_atomically
from thinwire.core.layout import Layout

FILE = "described.json"


@dataclass(frozen=True)
class Described:
    """One task as the process that trains has seen it. `files` are the digests of all code beside it that it used."""

    spec: str
    name: str
    version: str = ""
    source_digest: str = ""
    file: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] | None = None
    error: str = ""
    wrong: Sequence[str] = ()  # what `compute/errors.py` has raised as it was imported
    left_out: str = ""  # what of the model's state does not travel, in words

    @classmethod
    def told(cls, row: Mapping[str, Any]) -> Described:
        """As the process tells it; LookupError, TypeError or ValueError where it cannot be."""
        if "wrong" in row:
            wrong = tuple(str(text) for text in row["wrong"])
            return cls(row["spec"], str(row["spec"]).partition("=")[0], error=wrong[1], wrong=wrong)
        found = cls(**row)
        _ = found.report  # which reads the layout
        return found

    @cached_property
    def parsed(self) -> Layout | None:
        return Layout.from_json(self.layout) if self.layout is not None else None

    @property
    def report(self) -> TaskReport:
        if self.parsed is None:
            return TaskReport(self.name, self.version, self.source_digest, error=self.error)
        return TaskReport(self.name, self.version, self.source_digest, self.parsed.digest, tuple(codecs))

    @property
    def holds(self) -> bool:
        """Whether all its code is what it was."""
        try:
            return bool(self.files) and all(
                hashlib.sha256(Path(name).read_bytes()).hexdigest() == digest for name, digest in self.files.items()
            )
        except OSError:
            return False


def kept(folder: Path, key: Mapping[str, Any], specs: Sequence[str]) -> list[Described] | None:
    """What was found the last time under the same `key` (interpreter, its packages, compute device), when it holds."""
    try:
        raw = json.loads((folder / FILE).read_bytes())
        found = [Described(**row) for row in raw["tasks"]]
        for one in found:
            Layout.from_json(one.layout or {})  # KeyError where there is none
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = raw.get("key") == dict(key) and [one.spec for one in found] == list(specs)
    return found if same and all(one.holds for one in found) else None


def keep(folder: Path, key: Mapping[str, Any], found: Sequence[Described]) -> None:
    """For the next start; not when a task has an error, which may not be one of its code."""
    if any(one.error for one in found):
        return
    try:
        raw = {"key": dict(key), "tasks": [asdict(one) for one in found]}
        write_atomically(folder / FILE, json.dumps(raw).encode())
    except DataLost:
        return  # it only saves time
