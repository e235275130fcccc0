"""The options of the last start of an aggregator or a client, which its state directory keeps.

Services, the doctor and hints use them, so that what starts again has the same addresses, tasks and certificate.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from thinwire.core.statedir import write_atomically

FILE: Final = "start.json"
NOT_KEPT: Final = ("background", "once", "home")  # of a start by hand, and the directory in which the file lies


@dataclass(frozen=True)
class StartOptions:
    """The options given to `thinwire NOUN start`, by parameter name, and the folder in which it was typed.

    An option that has its default is absent. Paths are strings, as typed.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)

    def words(self) -> tuple[str, ...]:
        """Return the options as command-line words.

        >>> StartOptions({"task": ["a=x.py", "b=y.py"], "threads": 2, "no_dashboard": True}).words()
        ('--task', 'a=x.py', '--task', 'b=y.py', '--threads', '2', '--no-dashboard')
        """
        found: list[str] = []
        for name, value in self.options.items():
            option = f"--{name.replace('_', '-')}"
            for one in value if isinstance(value, list | tuple) else [value]:
                found += [option] if one is True else [option, str(one)]
        return tuple(found)

    def path(self, name: str) -> Path | None:
        """Return the path of one option, relative to the folder of the start; None if the option is absent."""
        return self.folder / self.options[name] if name in self.options else None

    def without(self, *names: str) -> StartOptions:
        """Return these options without those called `names`."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in names})

    def save(self, place: Path) -> None:
        """Write the options to start.json in the state directory `place`, without those of `NOT_KEPT`."""
        saved = {"options": self.without(*NOT_KEPT).options, "folder": str(self.folder)}
        write_atomically(place / FILE, json.dumps(saved).encode())

    @classmethod
    def load(cls, place: Path) -> StartOptions | None:
        """Return the options of the last start in `place`; None if there was none or the file is damaged."""
        try:
            saved = json.loads((place / FILE).read_bytes())
            return cls(dict(saved["options"]), Path(saved["folder"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def start_command(place: Path) -> str:
    """Return `aggregator start` with the options of the last start in `place`."""
    return shlex.join(["aggregator", "start", *(StartOptions.load(place) or StartOptions()).words()])
