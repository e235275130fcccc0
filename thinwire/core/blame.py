"""Whose code an exception came from, where another package's is called: what is not ours is not called our defect."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from thinwire.core.registry import Registry


@dataclass(frozen=True)
class Blame:
    """The installed thing in whose code an exception was raised, or whose call of another library raised it."""

    kind: str
    name: str
    package: str
    entry: str  # MODULE:NAME, as its package says
    place: str  # FILE:LINE

    def said(self, error: BaseException) -> str:
        """For who stands before this machine: an exception's own text may hold data, and is for nobody else."""
        told = f": {error}" if str(error) else ""
        return f"the {self.kind} {self.name!r} of {self.package} raised {type(error).__name__}{told}"


def blamed(error: BaseException, *registries: Registry[Any]) -> Blame | None:
    """Who of what is installed stands innermost in the traceback; None where it is our own code alone."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for kind, name, entry in ((r.kind, *found) for r in registries for found in r.installed.items()):
            if _holds(entry, frame.filename):
                package = entry.dist.name if entry.dist else entry.module.partition(".")[0]
                return Blame(kind, name, package, entry.value, f"{frame.filename}:{frame.lineno}")
    return None


def _holds(entry: EntryPoint, filename: str) -> bool:
    """Whether this file is the module of an entry point, or stands in the same package."""
    module = sys.modules.get(entry.module)
    if module is None or not module.__file__:
        return False
    beside = Path(module.__file__).parent in Path(filename).parents
    return filename == module.__file__ or (bool(module.__package__) and beside)
