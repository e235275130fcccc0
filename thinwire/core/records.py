"""Copies of dataclasses, and dictionaries of them, faster than `dataclasses.replace` and `asdict`.

An update makes some fifteen changed copies of frozen records, on its device and on the aggregator. `replace` copies the
dictionary of an instance, in place of a call of `object.__setattr__` for each field. `plainly` copies no leaf.
"""

from __future__ import annotations

import dataclasses
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

__all__ = ["plainly", "replace"]

if TYPE_CHECKING:
    from dataclasses import replace  # a type checker knows the fields of the record
else:

    def replace(record, /, **changes):
        """Return a copy of a dataclass with these fields changed, as `dataclasses.replace` does.

        Invariant: `dataclasses.replace` itself copies a record that is more than its fields.
        """
        kind = type(record)
        if not _is_plain(kind):
            return dataclasses.replace(record, **changes)
        made = object.__new__(kind)
        made.__dict__.update(record.__dict__)
        made.__dict__.update(changes)
        return made


@cache
def _is_plain(kind: type[Any]) -> bool:
    """Return True if a record of this class is its fields alone: nothing is computed, checked, cached or in slots."""
    cached = any(isinstance(value, cached_property) for base in kind.__mro__ for value in vars(base).values())
    special = cached or hasattr(kind, "__post_init__") or hasattr(kind, "__slots__")
    return not special and all(each.init for each in dataclasses.fields(kind))


LEAVES = frozenset({str, int, float, bool, type(None)})


def plainly(thing: Any) -> dict[str, Any]:
    """Return a dictionary equal to `dataclasses.asdict(thing)`, without copying leaves.

    >>> from thinwire.core.types import Work
    >>> plainly(Work(5, 32))
    {'steps': 5, 'batch': 32, 'clip': 0.0}
    """
    return {
        name: value if type(value := getattr(thing, name)) in LEAVES else _plain(value) for name in _names(type(thing))
    }


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind is list or kind is tuple:
        return kind([each if type(each) in LEAVES else _plain(each) for each in value])
    if kind is dict:
        return {key: each if type(each) in LEAVES else _plain(each) for key, each in value.items()}
    if _names(kind):
        return plainly(value)
    if isinstance(value, (list, tuple, dict)):  # named tuples and the like, as asdict treats them
        return dataclasses.asdict(_Holder(value))["value"]
    return value


@dataclasses.dataclass(frozen=True)
class _Holder:
    value: Any


def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; none for any other class."""
    if (known := _NAMES.get(kind)) is None:
        known = tuple(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
        _NAMES[kind] = known
    return known


_NAMES: dict[type[Any], tuple[str, ...]] = {}
