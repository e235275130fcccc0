"""Measure the bytes of a distribution and all that it requires, as installed here: no package index is queried."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import thinwire

OURS = Path(thinwire.__file__).parent


def required(name: str, extras: Iterable[str] = ()) -> dict[str, Distribution]:
    """It and everything that it requires on this machine, by canonical name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    wanted = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while wanted:
        called, extra = wanted.pop()
        if (called, extra) in seen:
            continue
        seen.add((called, extra))
        found[called] = found.get(called) or distribution(called)
        for line in found[called].requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                wanted += [(canonicalize_name(need.name), more) for more in ("", *need.extras)]
    return dict(sorted(found.items()))


def installed_bytes(found: Distribution) -> int:
    """Return the bytes of all its files, with the bytecode that was compiled at its installation."""
    files = {Path(str(found.locate_file(file))).resolve() for file in found.files or ()}
    if canonicalize_name(found.name) == "thinwire":
        files |= {path for path in OURS.rglob("*") if path.suffix != ".pyc"}
    return sum(path.stat().st_size for path in files if path.is_file())
