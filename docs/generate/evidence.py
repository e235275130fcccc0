"""What benchmarks printed and was committed under docs/evidence, and how a page says where it was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from thinwire.core.formatting import counted

EVIDENCE = Path(__file__).parents[1] / "evidence"
Row = Mapping[str, Any]
LIBRARIES = ("numpy", "torch")
WIDE = 120
CODE, HELD = re.compile("`[^`]+`"), "\x00"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EVIDENCE / f"{name}.json").read_text())
    return found


def at_commit(document: Mapping[str, Any]) -> str:
    """Day and commit of a measurement; the commit of a tree with changes that were not committed ends in `+`.

    >>> at_commit({"at": "2026-11-23T20:22:39+00:00", "commit": "ac39df61f621ef91+"})
    '2026-11-23 at commit `ac39df6` with uncommitted changes'
    """
    commit = document["commit"]
    dirty = " with uncommitted changes" if commit.endswith("+") else ""
    return f"{document['at'][:10]} at commit `{commit[:7]}`{dirty}"


def measured(document: Mapping[str, Any], how: str, *more: str) -> str:
    """When, at which commit and where, and what else there is to say of it; lines as long as others of a page."""
    machine = document["machine"]
    told = [f"{name} {version}" for name, version in machine["versions"].items() if name in LIBRARIES]
    preset = "" if document.get("benchmark") == "demo" else f"`--preset {document['preset']}`, "
    first = (
        f"Measured on {at_commit(document)}, {preset}{how}: {counted(machine['cores'], 'core')} of an "
        f"{machine['cpu']}, a virtual machine ({machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}, {', '.join(told)})"
    )
    return paragraph("; ".join((first, *more)) + ".")


def paragraph(text: str) -> str:
    """Lines as long as others of a page; what stands as code stays on one.

    >>> paragraph("x " * 58 + "`a b`").splitlines()[1]
    '`a b`'
    """
    kept = CODE.sub(lambda found: found.group().replace(" ", HELD), text)
    return fill(kept, WIDE, break_on_hyphens=False).replace(HELD, " ")
