"""Plans as text and as values: the keys of a plan, the ones that differ from their defaults, and TOML.

`sparse` and `toml_text` make from any plan the short one that means the same: `RunPlan.parse(toml_text(sparse(plan)))`
is the plan again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo

from thinwire.core.errors import PlanError
from thinwire.core.plan_schema import Sections
from thinwire.core.plan_values import MOST, PrivacySection

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

MAX_VALUES = 2**14  # tables, lists and their entries: checking a wrong one takes 10 us and 1 kB
MAX_LETTERS = 2**20  # of all keys and texts: 64 for each value; the longest of our examples has 700
MAX_DEPTH = 16  # tables and lists in each other
BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key that TOML reads without quotes


def require_small(raw: Any, source: str) -> None:
    """Raise PlanError for more than MAX_VALUES values, MAX_DEPTH in each other or MAX_LETTERS, and for text that UTF-8
    does not have, before pydantic checks any: plans come from others.
    """
    left, found, letters = [(raw, 0)], 0, 0
    while left:
        inner, depth = left.pop()
        if isinstance(inner, str):
            letters += len(inner)
            if letters > MAX_LETTERS:
                why, hint = f"{MAX_LETTERS:,} are read", "shorter names, globs and codecs, or fewer of them"
                raise PlanError(f"{source} holds more than {MAX_LETTERS:,} letters", why=why, hint=hint)
            if not inner.isascii():
                _require_utf8(inner, source)
        elif isinstance(inner, (Mapping, list, tuple)):
            found += len(inner)
            if found > MAX_VALUES:
                raise PlanError(
                    f"{source} holds more than {MAX_VALUES:,} values", why="that many are read", hint="shorter lists"
                )
            if depth == MAX_DEPTH:
                why = f"{MAX_DEPTH} tables or lists in each other are read"
                raise PlanError(f"{source} is nested too deep", why=why, hint="a plan has sections, and keys in them")
            each = chain(inner, inner.values()) if isinstance(inner, Mapping) else inner
            left += ((one, depth + 1) for one in each)


def _require_utf8(text: str, source: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = f"UTF-8 has no {text[error.start]!a}, which is half of a character"
        raise PlanError(f"{source} holds text that is not UTF-8", why=why, hint="write the whole character") from error


def plan_keys() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, key, field) of all keys of a plan, in the plan's order."""
    for section, table in Sections.model_fields.items():
        for name, field in getattr(table.annotation, "model_fields", {}).items():
            yield section, name, field


def plain(value: Any) -> Any:
    """Return a value as JSON types."""
    if isinstance(value, tuple):
        return list(value)
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def default_of(field: FieldInfo) -> Any:
    """Return the default of a key as JSON types; None for a key that a plan needs."""
    return None if field.is_required() else plain(field.get_default(call_default_factory=True))


def is_default(field: FieldInfo, value: Any) -> bool:
    """Return True if `value` is the default of a key."""
    return not field.is_required() and default_of(field) == value


def delta_left_out(raw: Mapping[str, Any]) -> float:
    """Return the delta of a plan that leaves it out: at most 1 / (10 clients), or 1 / (10 records) in mode example."""
    default, privacy = float(PrivacySection.model_fields["delta"].default), raw.get("privacy")
    if not isinstance(privacy, Mapping) or privacy.get("mode", "off") == "off":
        return default
    of, key = ("privacy", "records") if privacy["mode"] == "example" else ("cohort", "clients")
    count = table.get(key) if isinstance(table := raw.get(of), Mapping) else None
    if not isinstance(count, int) or not 1 / (10 * default) < count <= MOST:  # no plan with more is read
        return default
    return 1 / (10 * count)


def sparse(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of a plan whose values differ from their defaults, by section.

    >>> sparse({"run": {"task": "digits", "rounds": 20}, "local": {"lr": 0.5, "batch": 8}})
    {'run': {'task': 'digits'}, 'local': {'lr': 0.5, 'batch': 8}}
    """
    found: dict[str, dict[str, Any]] = {}
    for section, name, field in plan_keys():
        table = values.get(section)
        if not isinstance(table, Mapping) or name not in table:
            continue
        left_out = default_of(field) if (section, name) != ("privacy", "delta") else delta_left_out(values)
        if field.is_required() or table[name] != left_out:
            found.setdefault(section, {})[name] = table[name]
    return found


def origins(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return where each value of a resolved plan comes from, by section and key: `plan`, `default` or `derived`.

    A stored plan does not tell who set a key: `plan` is a value other than the default, whether from the file, `--set`
    or a clone, and `default` one that equals it. `derived` is a delta that the plan left out.

    >>> origins({"run": {"task": "digits", "rounds": 20}, "local": {"lr": 0.5}})
    {'run': {'task': 'plan', 'rounds': 'default'}, 'local': {'lr': 'plan'}}
    """
    given, found = sparse(values), dict[str, dict[str, str]]()
    for section, name, field in plan_keys():
        table = values.get(section)
        if isinstance(table, Mapping) and name in table:
            known = "default" if is_default(field, table[name]) else "derived"
            found.setdefault(section, {})[name] = "plan" if name in given.get(section, {}) else known
    return found


def plan_text(plan: RunPlan) -> str:
    """Return a plan as the TOML that a person would type: the keys that differ from their defaults.

    Invariant: reading the text gives a plan with the same digest.
    """
    return toml_text(sparse(plan.to_json()))


def toml_text(given: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of a plan as TOML; a key without a value is left out.

    >>> print(toml_text({"run": {"task": "digits", "target": {"value": 0.9}}, "local": {"lr": 0.5}}), end="")
    [run]
    task = "digits"
    target = { value = 0.9 }
    <BLANKLINE>
    [local]
    lr = 0.5
    """
    tables = []
    for section, table in given.items():
        lines = [f"{_key(name)} = {toml(value)}" for name, value in table.items() if value is not None]
        if lines:
            tables.append("\n".join([f"[{_key(section)}]", *lines, ""]))
    return "\n".join(tables)


def toml(value: Any) -> str:
    """Return a value in TOML's notation; a table is written on one line.

    >>> toml({"*.bias": "fp16"}), toml([1, 0.5]), toml(True)
    ('{ "*.bias" = "fp16" }', '[1, 0.5]', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = (f"{_key(name)} = {toml(inner)}" for name, inner in value.items() if inner is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return _string(value) if isinstance(value, str) else str(value)


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """Return a basic string of TOML: as in JSON, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
