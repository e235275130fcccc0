"""The figures of the full runs that are committed under docs/evidence, with the command and commit that made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy_bytes.changed import CHANGED, PROTOCOL
from benchmarks.accuracy_bytes.models import FULL

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "accuracy-bytes.json"
FIGURE = "best_ratio_within_half_point_{}"
TOLD = ("ratio", "seeds", "accuracy", "bits_per_param", "difference")
NOT_THERE = "its full run has not finished"


def read(path: Path = EVIDENCE) -> dict[str, Any]:
    """The committed document: {"models": {name: its part, or {"reason": why there is none}}}."""
    if not path.exists():
        return {"models": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def finished(document: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    part: dict[str, Any] = document["models"].get(model, {})
    return part if "conclusion" in part else None


def figures(document: Mapping[str, Any]) -> dict[str, float | None]:
    """A ratio for each model; None where its part has not finished."""
    parts = {name: finished(document, name) for name in FULL}
    return {FIGURE.format(name): part["conclusion"]["figure"] if part else None for name, part in parts.items()}


def reasons(document: Mapping[str, Any]) -> dict[str, str]:
    """Why a figure is not there."""
    missing = [name for name in FULL if finished(document, name) is None]
    return {FIGURE.format(name): document["models"].get(name, {}).get("reason", NOT_THERE) for name in missing}


def rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each figure rests on: the chain on seeds B, what made it, and what of the rules was changed on the way."""
    found = []
    for name in FULL:
        if (part := finished(document, name)) is None:
            found.append({"model": name, "figure": None, "reason": reasons(document)[FIGURE.format(name)]})
            continue
        conclusion: dict[str, Any] = part["conclusion"]
        on_b: dict[str, Any] = next((one for one in part["b"] if one["chain"] == conclusion["chain"]), {})
        told: dict[str, Any] = {key: on_b[key] for key in TOLD if key in on_b}
        made = {key: part[key] for key in ("command", "commit", "at")}
        rounds, rules = part["rounds"]["rounds"], {"protocol": PROTOCOL[name], "changed": CHANGED[name]}
        found.append({"model": name, "rounds": rounds, **conclusion, **told, **made, **rules})
    return found
