"""What was decided, written down before anything that follows from it runs."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.accuracy_bytes.trials import Chain
from benchmarks.document import commit
from thinwire.core.errors import DataLost
from thinwire.core.statedir import private_folder, write_atomically


@dataclass(frozen=True)
class Decisions:
    """A file for each step. One that says something else than what its cells come to now is `DataLost`: cells or rules
    were changed after the fact, and what came after it cannot be trusted.
    """

    folder: Path

    def keep(self, step: str, value: Any) -> None:
        told, path = json.loads(json.dumps(plain(value))), self.folder / f"{step}.json"
        if path.exists():
            if json.loads(path.read_text())["decided"] != told:
                raise DataLost(
                    f"{path} is not what its cells come to", why="cells or rules were changed after the fact",
                    hint="begin again in another --folder",
                )  # fmt: skip
            return
        private_folder(self.folder)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        document = {"decided": told, "at": at, "commit": commit()}
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")

    def all(self) -> dict[str, Any]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))}


def plain(value: Any) -> Any:
    """Dataclasses as dicts, chains by their names; a number that is none as None."""
    if isinstance(value, Chain):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
