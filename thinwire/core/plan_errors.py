"""The errors of a plan: those of pydantic in plain words, each with its reason and a valid value.

`explain` rewords one error. It also serves other files of this kind, such as a client's policy.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from thinwire.core.plan_schema import UNKNOWN_NAME

MAX_EXPLAINED = 1000  # errors of a plan: nobody reads more, and to explain all of MAX_VALUES takes a second
SHOWN = 200  # characters of a typed value in an error
SHOULD = "it should be "
MAX_COMPARED = 80  # characters of an unknown key to compare with known keys: difflib takes 40 bytes for each
PLAIN = (  # pydantic's words and ours
    ("greater than or equal to ", "at least "), ("less than or equal to ", "at most "), ("greater than ", "above "),
    ("less than ", "below "), ("valid integer", "whole number"), ("valid number", "number"), ("valid string", "string"),
    ("a valid boolean", "true or false"),
)  # fmt: skip
TABLE = ("model_type", "model_attributes_type", "dict_type")


@dataclass(frozen=True)
class Problem:
    """Holds what is wrong with a plan at one place, the reason, and what to try; `place` is section, key and so on.

    A problem of the whole plan has the place ().
    """

    place: tuple[str, ...]
    what: str
    why: str
    hint: str


def wrong_values(plan: type[BaseModel], error: ValidationError) -> list[Problem]:
    """Return pydantic's first errors about a `plan`: each wrong key once, with every way in which it could be valid."""
    found: dict[str, tuple[tuple[str, ...], list[str], str]] = {}
    placed = [(place_of(details), details) for details in error.errors(include_url=False)[:MAX_EXPLAINED]]
    unknown = [place for place, details in placed if details["type"] == "extra_forbidden"]
    for place, details in placed:
        what, why, hint = explain(plan, details)
        if details["type"] == "missing":
            there = [key for *table, key in unknown if tuple(table) == place[:-1] and len(key) <= MAX_COMPARED]
            if near := _nearest(place[-1], there):
                hint = f"{_shown(place)} instead of {_shown((*place[:-1], near))}"
        _, whys, _ = found.setdefault(what, (place, [], hint))
        whys += [why] if why not in whys else []
    return [
        Problem(place, what, either(whys) + (_meaning(plan, place) if whys[1:] else ""), hint)
        for what, (place, whys, hint) in found.items()
    ]


def _meaning(plan: type[BaseModel], place: tuple[str, ...]) -> str:
    """Return the description of a key in parentheses, for a value that may be one of several things; "" without one."""
    model = _model_at(plan, place[:-1])
    field = model.model_fields.get(place[-1]) if model is not None else None
    return f" ({field.description})" if field and field.description else ""


def explain(
    plan: type[BaseModel], details: Mapping[str, Any], noun: str = "plan", keys: str = "thinwire plan keys {}"
) -> tuple[str, str, str]:
    """Return (what, why, hint) for one of pydantic's errors about `plan`; `keys` is the command that lists a table's
    keys.
    """
    place = place_of(details)
    has_keys = noun == "file" and any(_model_at(plan, (key,)) is None for key in plan.model_fields)
    flat = has_keys and _model_at(plan, place[:1]) is None  # a key outside of any table
    name = ".".join(place) if flat else _shown(place)
    kind = details["type"]
    if kind == "extra_forbidden":
        known = _keys(plan, place[:-1])
        near = _nearest(place[-1], known)
        where = f"[{place[0]}]" if len(place) > 1 else f"a {noun}"
        hint = near if flat and near else _shown((*place[:-1], near)) if near else keys.format(place[0])
        return f"unknown key {name}", f"{where} has the keys {', '.join(known)}", hint
    if kind == "missing":
        return f"{name} is missing", f"every {noun} needs it", _example(place)
    if kind == UNKNOWN_NAME:
        said = details["ctx"]
        return f"{name} = {_typed(details['input'])}: {said['what']}", said["why"], said["hint"]
    hint = keys.format(place[0] if place else "").strip()
    if kind in TABLE and len(place) > 1 and (model := _model_at(plan, place)) is not None:
        hint = f"{name} = {_table_of(model)}"
    return f"{name} = {_typed(details.get('input'))} is not valid", _wanted(details), hint


def _typed(value: Any) -> str:
    """Return a wrong value as an error shows it: its beginning, if it is long."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that is most like `key`, or None if none is alike."""
    return next(iter(difflib.get_close_matches(key[:MAX_COMPARED], known, n=1, cutoff=0.5)), None)


def places_of(plan: type[BaseModel], key: str) -> list[str]:
    """Return `section.key` for each section that has this key, or else the one most like it."""
    found = [(table, name) for table in plan.model_fields for name in _keys(plan, (table,))]
    near = key if any(name == key for _, name in found) else _nearest(key, [name for _, name in found])
    return [f"{table}.{name}" for table, name in found if name == near]


def either(whys: Sequence[str]) -> str:
    """Join the reasons of a value that may be one of several things.

    >>> either(['it should be "auto"', "it should be above 0"])
    'it should be "auto" or above 0'
    """
    first, *others = whys
    return " or ".join([first, *(why.removeprefix(SHOULD) for why in others)])


def _wanted(details: Mapping[str, Any]) -> str:
    """Return what the value should be, in pydantic's words, without what it was."""
    if details["type"] in TABLE:
        return f"{SHOULD}a table"
    if details["type"] == "string_pattern_mismatch" and place_of(details) == ("run", "task"):
        return "it names a task, by letters, digits, - and _; its code is given apart from the plan, as NAME=MODULE"
    said = str(details["msg"]).removeprefix("Value error, ")
    said = said.replace("Input should be ", SHOULD).replace("String should have ", f"{SHOULD}of ")
    for theirs, ours in PLAIN:
        said = said.replace(theirs, ours)
    if details["type"] == "literal_error":
        said = said.replace("'", '"')  # as it is typed in TOML
    return said.partition(", got ")[0].partition(", unable ")[0]


def place_of(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the section, the key and the keys inside it that one of pydantic's errors is about."""
    loc = details["loc"]
    unknown = loc[-1:] if details["type"] == "extra_forbidden" else ()  # a key, though it be called "str"
    tables = loc[: len(loc) - len(unknown)]
    return (*(part for part in tables if isinstance(part, str) and not _is_branch(part)), *map(str, unknown))


def _is_branch(part: str) -> bool:
    """Return True if the part is the tried member of a union: pydantic adds it to the location, and it is not a key."""
    return part in ("bool", "int", "float", "str") or part.startswith(
        ("constrained-", "literal[", "list[", "function-")
    )


def _shown(place: tuple[str, ...]) -> str:
    if not place:
        return "the file"
    table, *keys = (part if len(part) <= SHOWN else f"{part[:SHOWN]}..." for part in place)
    return " ".join([f"[{table}]", ".".join(keys)] if keys else [f"[{table}]"])


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
    """Return a table with all its keys on one line of TOML; a key without a default has `...`."""
    values = ((name, field.get_default(call_default_factory=False)) for name, field in model.model_fields.items())
    told = (f"{name} = {'...' if value is PydanticUndefined else json.dumps(value)}" for name, value in values)
    return "{ " + ", ".join(told) + " }"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    inner = (annotation, *getattr(annotation, "__args__", ()))
    return next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _example(place: tuple[str, ...]) -> str:
    examples = {("run", "task"): '[run] task = "digits"', ("local", "lr"): "[local] lr = 0.1"}
    return next((line for key, line in examples.items() if key[: len(place)] == place), f"{_shown(place)} = ...")
