"""`--set section.key=value`: put into a plan's tables before they are checked, and named where it is what is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.errors import PlanError

SHOWN = 200  # characters of what was typed, where it is named


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
            table[key] = self._parsed(place, value)
        return raw

    def origin(self, place: Sequence[str], source: str) -> str:
        """Where what stands at `place` came from: `source`, the option, or the one with the other."""
        near = [key for key in self.values if all(a == b for a, b in zip(key.split("."), place, strict=False))]
        typed = " ".join(map(self._typed, near))
        if any(len(key.split(".")) <= len(place) for key in near):
            return typed
        return f"{source} with {typed}" if near else source

    def _parsed(self, place: str, value: str) -> Any:
        """As TOML has it; a bare word is a string."""
        try:
            found = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            found = {"value": value}
        except (ValueError, RecursionError) as error:  # what Python does not read: so many digits, so many brackets
            raise PlanError(f"{self._typed(place)} cannot be read", why=str(error), hint="a shorter value") from error
        if len(found) > 1 or (found["value"] == value and len(value.splitlines()) > 1):
            hint = f"one {self.option} for each key"
            raise PlanError(f"{self._typed(place)} is more than a value", why="it has several lines", hint=hint)
        return found["value"]

    def _typed(self, place: str) -> str:
        value = "\\n".join(self.values[place].splitlines())
        return f"{self.option} {place}={value if len(value) <= SHOWN else value[:SHOWN] + '...'}"
