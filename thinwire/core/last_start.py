"""Read the options of a last start from the state directory, so that the same command can be shown again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

START_FILE: Final = "start.json"  # in the folder of the aggregator or of a client


def read_options(place: Path) -> dict[str, Any]:
    """Return the options of the last start in a folder by name; none if there was no start or the file is damaged."""
    try:
        return dict(json.loads((place / START_FILE).read_bytes())["options"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def option_words(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return options as command-line words.

    >>> option_words({"task": ["a=x.py", "b=y.py"], "threads": 2, "no_dashboard": True})
    ('--task', 'a=x.py', '--task', 'b=y.py', '--threads', '2', '--no-dashboard')
    """
    found: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else [value]:
            found += [option] if one is True else [option, str(one)]
    return tuple(found)


def same_start(place: Path) -> str:
    """Return `aggregator start` with the options of its last start, which keep its address and its certificate."""
    return shlex.join(["aggregator", "start", *option_words(read_options(place))])
