"""A wrong key or value of a plan, or of another file like it, in words: what, why, and what would be right."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

SHOULD = "it should be "
MAX_COMPARED = 80  # letters of an unknown key that known ones are compared with: difflib takes 40 bytes for each
TABLE = ("model_type", "model_attributes_type", "dict_type")
WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(TABLE, "a table"),
    "list_type": "a list",
    "string_type": "text",
    "string_pattern_mismatch": "text of the form {pattern}",
    "finite_number": "a finite number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "under {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}


def explain(
    plan: type[BaseModel], details: Mapping[str, Any], noun: str = "plan", keys: str = "thinwire plan keys {}"
) -> tuple[str, str, str]:
    """(what, why, try) for one of pydantic's errors about `plan`; `keys` says where a table's keys are listed."""
    place = place_of(details)
    name = _shown(place)
    kind = details["type"]
    if kind == "extra_forbidden":
        known = _keys(plan, place[:-1])
        near = difflib.get_close_matches(place[-1][:MAX_COMPARED], known, n=1, cutoff=0.5)
        where = f"[{place[0]}]" if len(place) > 1 else f"a {noun}"
        hint = f"{_shown((*place[:-1], near[0]))}" if near else keys.format(place[0])
        return f"unknown key {name}", f"{where} has the keys {', '.join(known)}", hint
    if kind == "missing":
        return f"{name} is missing", f"every {noun} needs it", _example(place)
    hint = keys.format(place[0] if place else "").strip()
    if kind in TABLE and len(place) > 1 and (model := _model_at(plan, place)) is not None:
        hint = f"{name} = {_table_of(model)}"
    return f"{name} = {details.get('input')!r} cannot be", _wanted(details), hint


def either(whys: Sequence[str]) -> str:
    """What a value should be, where it may be one of several things.

    >>> either(["it should be 'auto'", "it should be above 0"])
    "it should be 'auto' or above 0"
    """
    first, *others = whys
    return " or ".join([first, *(why.removeprefix(SHOULD) for why in others)])


def _wanted(details: Mapping[str, Any]) -> str:
    """What the value should be, in the words of docs/reference/plan.md."""
    said = WANTED.get(details["type"])
    if said is None:
        return str(details["msg"]).replace("Input should be ", SHOULD).removeprefix("Value error, ")
    return SHOULD + said.format(**details.get("ctx", {}))


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
    model = _model_at(plan, place)
    return list(model.model_fields) if model is not None else []


def _model_at(plan: type[BaseModel], place: tuple[str, ...]) -> type[BaseModel] | None:
    model = plan
    for name in place:
        inner = _model_in(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is None:
            return None
        model = inner
    return model


def _table_of(model: type[BaseModel]) -> str:
    """A table of all its keys, as TOML writes one in a line; `...` where there is no default."""
    values = ((name, field.get_default(call_default_factory=False)) for name, field in model.model_fields.items())
    told = (f"{name} = {'...' if value is PydanticUndefined else json.dumps(value)}" for name, value in values)
    return "{ " + ", ".join(told) + " }"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _example(place: tuple[str, ...]) -> str:
    examples = {("run", "task"): '[run] task = "digits"', ("local", "lr"): "[local] lr = 0.1"}
    return next((line for key, line in examples.items() if key[: len(place)] == place), f"{_shown(place)} = ...")
