"""A wrong key or value of a plan, or of another file like it, in words: what, why, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def explain(
    plan: type[BaseModel], details: Mapping[str, Any], noun: str = "plan", keys: str = "thinwire plan keys {}"
) -> tuple[str, str, str]:
    """(what, why, try) for one of pydantic's errors about `plan`; `keys` says where a table's keys are listed."""
    place = place_of(details)
    name = _shown(place)
    kind = details["type"]
    if kind == "extra_forbidden":
        known = _keys(plan, place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        where = f"[{place[0]}]" if len(place) > 1 else f"a {noun}"
        hint = f"{_shown((*place[:-1], near[0]))}" if near else keys.format(place[0])
        return f"unknown key {name}", f"{where} has the keys {', '.join(known)}", hint
    if kind == "missing":
        return f"{name} is missing", f"every {noun} needs it", _example(place)
    said = str(details["msg"]).replace("Input should be", "it should be").removeprefix("Value error, ")
    return (
        f"{name} = {details.get('input')!r} cannot be",
        said,
        keys.format(place[0] if place else "").strip(),
    )


def place_of(details: Mapping[str, Any]) -> tuple[str, ...]:
    """The section, the key and what lies in it, of what one of pydantic's errors is about."""
    return tuple(part for part in details["loc"] if isinstance(part, str) and not _is_branch(part))


def _is_branch(part: str) -> bool:
    """Pydantic adds the tried member of a union to the place; it is not a key of ours."""
    return part in ("int", "float", "str") or part.startswith(("constrained-", "literal[", "list[", "function-"))


def _shown(place: tuple[str, ...]) -> str:
    if len(place) < 2:
        return f"[{place[0]}]" if place else "the file"
    return f"[{place[0]}] {'.'.join(place[1:])}"


def _keys(plan: type[BaseModel], place: tuple[str, ...]) -> list[str]:
    model = plan
    for name in place:
        inner = _model_in(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _example(place: tuple[str, ...]) -> str:
    examples = {("run", "task"): '[run] task = "digits"', ("local", "lr"): "[local] lr = 0.1"}
    return next((line for key, line in examples.items() if key[: len(place)] == place), f"{_shown(place)} = ...")
