"""`--set section.key=value`: put into a plan's tables before they are checked, and named where it is what is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.errors import PlanError


@dataclass(frozen=True)
class Overrides:
    """Values in TOML's own notation by their place, `section.key`; `option` is what they were typed behind.

    >>> Overrides({"local.lr": "0.1", "uplink.codec": "int8"}).put({"local": {"lr": 0.5}})
    {'local': {'lr': 0.1}, 'uplink': {'codec': 'int8'}}
    """

    values: Mapping[str, str] = field(default_factory=dict)
    option: str = "--set"

    def put(self, raw: dict[str, Any]) -> dict[str, Any]:
        """`raw`, changed in place."""
        for place, value in self.values.items():
            *tables, key = place.split(".")
            if not tables or not all((*tables, key)):
                hint = f"{self.option} section.key=value, as in {self.option} local.lr=0.1"
                raise PlanError(f"{self._typed(place)} names no key", hint=hint)
            table = raw
            for name in tables:
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    why, hint = f"{name} is a value there, and has no keys", f"thinwire plan keys {tables[0]}"
                    raise PlanError(f"{self._typed(place)} names no key", why=why, hint=hint)
            table[key] = _parsed(value)
        return raw

    def origin(self, place: Sequence[str], source: str) -> str:
        """Where what stands at `place` came from: `source`, the option, or the one with the other."""
        near = [key for key in self.values if all(a == b for a, b in zip(key.split("."), place, strict=False))]
        typed = " ".join(map(self._typed, near))
        if any(len(key.split(".")) <= len(place) for key in near):
            return typed
        return f"{source} with {typed}" if near else source

    def _typed(self, place: str) -> str:
        return f"{self.option} {place}={self.values[place]}"


def _parsed(value: str) -> Any:
    """As TOML has it; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
