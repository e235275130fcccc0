"""Writes the state of a run as JSON and reads it back, so that a restart need not apply the whole journal.

The run stores a snapshot in the commit that opens about every `SNAPSHOT_ROUNDS`-th round. A restart reads the snapshot
and applies the events after it. Invariant: snapshot + later events = whole journal, at each event of each run.

A snapshot is only a shortcut. One that is too large is not written. One that another version wrote, or that is damaged,
is not read, and the restart applies the whole journal instead.

Each value is written by the type of its field: a dataclass as the list of its fields, a dictionary as a list of pairs
where its keys are no text, a set as a sorted list. An event has the form that the journal gives it. An object that
changes is written once. All other places hold its number, so that they share one object again.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from thinwire.core.events import Event
from thinwire.core.types import UpdateId
from thinwire.server.state.run_state import RunState
from thinwire.store import Store
from thinwire.store.journal import from_json, to_json

FORMAT = 1  # to be raised when a field changes its meaning, but neither its name nor its type
SNAPSHOT_ROUNDS = 100
SNAPSHOT_EVENTS = 20_000  # a run of many clients does not wait for so many rounds
MAX_SNAPSHOT_BYTES = 64 * 2**20


def serialize(state: RunState) -> str:
    """Return the snapshot of a state; "" if it would be larger than `MAX_SNAPSHOT_BYTES`."""
    text = json.dumps({"format": fingerprint(), "state": _Writer().plain(state, RunState)}, separators=(",", ":"))
    return text if len(text) <= MAX_SNAPSHOT_BYTES else ""


def parse(text: str) -> RunState | None:
    """Return the state of a snapshot; None if this version did not write it, or it is damaged."""
    if len(text) > MAX_SNAPSHOT_BYTES:
        return None
    try:
        raw = json.loads(text)
        if raw["format"] != fingerprint():
            return None
        found: RunState = _Reader().typed(raw["state"], RunState)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return found


def restore(store: Store, run_id: str, empty: RunState) -> tuple[RunState, Iterator[tuple[int, Event]]]:
    """Return the state of a run's snapshot, and the events after it, which are not applied yet.

    Without a snapshot that this version can read, return the `empty` state and the whole journal.
    """
    after, text = store.snapshot(run_id)
    found = parse(text) if text else None
    return (found, store.stream(run_id, after)) if found else (empty, store.stream(run_id))


@cache
def fingerprint() -> str:
    """Return a digest of the names and types of all fields of a state: it differs if the classes differ."""
    seen, todo = dict[str, list[str]](), list[Any]([RunState])
    while todo:
        kind = todo.pop()
        todo += get_args(kind)
        if not isinstance(kind, type) or issubclass(kind, Event) or kind.__qualname__ in seen:
            continue
        if known := _hints(cast(Any, kind)):
            seen[kind.__qualname__] = [f"{name}: {hint}" for name, hint in known.items()]
            todo += known.values()
    return hashlib.sha256(json.dumps([FORMAT, seen], sort_keys=True).encode()).hexdigest()[:16]


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    """Return {field: type} of a dataclass or a named tuple; {} for any other type."""
    names = [one.name for one in _fields(kind)] or list(getattr(kind, "_fields", ()))
    found = get_type_hints(cast(Any, kind)) if names else {}
    return {name: found[name] for name in names}


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind) if is_dataclass(kind) else ()


class _Writer:
    """Makes JSON values of a state. `numbers` has the objects that are written, which stay alive meanwhile."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # id() of an object -> its number

    def plain(self, value: Any, hint: Any) -> Any:
        """Return a value as JSON values."""
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, Event):
            return to_json(value)
        if isinstance(value, UpdateId):
            return str(value)
        if known := _hints(cast(Any, type(value))):
            return self._object(value, known)
        args = get_args(_not_none(hint))
        if isinstance(value, Mapping):
            key, item = _key_and_item(args)
            if key is str:
                return {name: self.plain(one, item) for name, one in value.items()}
            return [[name, self.plain(one, item)] for name, one in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, deque):
            return [value.maxlen, [self.plain(one, args[0]) for one in value]]
        if isinstance(value, tuple) and args and args[-1] is not Ellipsis:
            return [self.plain(one, item) for one, item in zip(value, args, strict=True)]
        return [self.plain(one, args[0] if args else Any) for one in value]

    def _object(self, value: Any, known: dict[str, Any]) -> Any:
        if _changes(type(value)):
            if id(value) in self.numbers:
                return {"same": self.numbers[id(value)]}
            self.numbers[id(value)] = len(self.numbers)
        return [self.plain(getattr(value, name), one) for name, one in known.items()]


class _Reader:
    """Makes a state of JSON values. `made` has the objects that may be shared, by number."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def typed(self, raw: Any, hint: Any) -> Any:
        """Return the value of a type that a `_Writer` wrote."""
        if raw is None or hint is Any:
            return raw
        if isinstance(raw, dict) and "event" in raw and _is_event(hint):
            return from_json(raw)
        hint = _not_none(hint)
        if hint is UpdateId:
            return UpdateId.parse(raw)
        kind, args = get_origin(hint) or hint, get_args(hint)
        if known := _hints(kind):
            return self._object(raw, kind, known)
        if not isinstance(kind, type) or kind in (str, int, float, bool):
            return raw  # a literal, or a plain value
        if issubclass(kind, Mapping):
            _, item = _key_and_item(args)
            pairs = raw.items() if isinstance(raw, dict) else raw
            return {name: self.typed(one, item) for name, one in pairs}
        if kind is deque:
            return deque((self.typed(one, args[0]) for one in raw[1]), raw[0])
        if kind is tuple and args and args[-1] is not Ellipsis:
            return tuple(self.typed(one, item) for one, item in zip(raw, args, strict=True))
        maker: Any = kind  # a list, a set or a tuple
        made: Any = maker(self.typed(one, args[0] if args else Any) for one in raw)
        return made

    def _object(self, raw: Any, kind: Any, known: dict[str, Any]) -> Any:
        """Make an object without its `__init__`; its dictionaries have their class, such as a Counter."""
        if isinstance(raw, dict):
            return self.made[raw["same"]]
        if not is_dataclass(kind):
            return kind(*(self.typed(one, hint) for one, hint in zip(raw, known.values(), strict=True)))
        made: Any = object.__new__(cast(Any, kind))
        if _changes(kind):
            self.made.append(made)
        for one, field, hint in zip(raw, _fields(kind), known.values(), strict=True):
            value = self.typed(one, hint)
            if isinstance(value, dict) and field.default_factory is not MISSING:
                empty: Any = field.default_factory()
                if type(empty) is not dict:
                    empty.update(value)
                    value = empty
            object.__setattr__(made, field.name, value)
        return made


def _changes(kind: Any) -> bool:
    """Return True if the fields of such an object may change, so that it matters who shares it."""
    return is_dataclass(kind) and not cast(Any, kind).__dataclass_params__.frozen


def _not_none(hint: Any) -> Any:
    """Return the member of a union that is not None, or the type itself. Only events have other unions."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(one for one in get_args(hint) if one is not type(None))
    return hint


def _key_and_item(args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the types of a dictionary's keys and values; a Counter names its keys only."""
    return (args[0], args[1]) if len(args) == 2 else (args[0] if args else str, int)


def _is_event(hint: Any) -> bool:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(isinstance(one, type) and issubclass(one, Event) for one in kinds)
