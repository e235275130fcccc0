"""Events as the journal keeps them: JSON, by the name of their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.core.events import Event
from thinwire.core.plainly import plainly

KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def to_json(event: Event) -> dict[str, Any]:
    """The event's fields as JSON values, and its class under `event` (ClientFailed has a `kind` of its own)."""
    return {"event": type(event).__name__, **plainly(event)}


def from_json(raw: Mapping[str, Any]) -> Event:
    """The event back; keys that a newer version wrote are ignored."""
    kind = KINDS[raw["event"]]
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in raw.items() if name in names})
