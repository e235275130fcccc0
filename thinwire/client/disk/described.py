"""What a client's tasks were at its last start, kept on disk: the next one says what has changed since."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thinwire.aggregation import codecs
from thinwire.core.errors import DataLost
from thinwire.core.fleet import MAX_TENSORS, TaskReport
from thinwire.core.home import write_atomically
from thinwire.core.layout import Layout, differences

FILE = "described.json"


@dataclass(frozen=True)
class Described:
    """One task as the process that trains has seen it."""

    spec: str
    name: str
    version: str = ""
    source_digest: str = ""
    file: str = ""
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
        text = self.parsed.text
        return TaskReport(
            self.name, self.version, self.source_digest, self.parsed.digest, tuple(codecs),
            tensors=text if len(text) <= MAX_TENSORS else "",
        )  # fmt: skip


def last(folder: Path) -> dict[str, Layout]:
    """The layouts of the tasks as they were described last, by name; none where nothing can be read."""
    try:
        rows = json.loads((folder / FILE).read_bytes())["tasks"]
        return {str(row["name"]): Layout.from_json(row["layout"]) for row in rows if row["layout"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def changed(before: Mapping[str, Layout], found: Sequence[Described]) -> list[str]:
    """Name each task whose model is another than `before`, with what differs."""
    pairs = [(one.name, one.parsed, before[one.name]) for one in found if one.parsed and one.name in before]
    return [
        f"the task {name} has another model than before: {differences(now, then)}"
        for name, now, then in pairs
        if now.digest != then.digest
    ]


def keep(folder: Path, found: Sequence[Described]) -> None:
    """For the next start; not when a task has an error, which may not be one of its code."""
    if any(one.error for one in found):
        return
    try:
        write_atomically(folder / FILE, json.dumps({"tasks": [asdict(one) for one in found]}).encode())
    except DataLost:
        return  # it only says what has changed
