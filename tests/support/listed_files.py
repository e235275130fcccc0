"""The table of files of docs/explain/private-outputs.md, and which files of an aggregator it does not name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "explain" / "private-outputs.md"
CELL = re.compile(r"^\| (.*?) \|", re.MULTILINE)  # the first cell of each row
QUOTED = re.compile(r"`([^`]+)`")


def listed() -> tuple[str, ...]:
    """The patterns of the table: files under `aggregator/`, and folders, which end with a slash."""
    table = PAGE.read_text().partition("## Files")[2]
    return tuple(name for cell in CELL.findall(table) for name in QUOTED.findall(cell))


def unlisted(files: Iterable[str]) -> list[str]:
    """Those of these paths under `aggregator/` that no pattern of the table matches."""
    return sorted(file for file in files if not any(_is_of(file, pattern) for pattern in listed()))


def _is_of(file: str, pattern: str) -> bool:
    """Return True if each part of the path matches; a pattern that ends with a slash is a folder with all below it."""
    parts, wanted = file.split("/"), pattern.split("/")
    if not wanted[-1]:
        wanted = wanted[:-1]
        parts = parts[: len(wanted)]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def files_under(aggregator: Path) -> set[str]:
    """The paths of all files of an aggregator's folder."""
    return {str(path.relative_to(aggregator)) for path in aggregator.rglob("*") if not path.is_dir()}
