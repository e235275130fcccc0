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

from thinwire.core.statedir import AggregatorHome, living_holder, write_atomically

FILE: Final = "start.json"
DEVICE_API_PORT: Final = 9090  # the default of `aggregator start`
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


def reachable_command(place: Path | None, home_option: str = "") -> str:
    """Return the command that starts the aggregator where other machines reach it, after the end of a running one.

    `home_option` is the `--home` of shown commands, or "".
    """
    start = f"thinwire {start_command(place, reachable=True)}{home_option}"
    running = place is not None and living_holder(AggregatorHome(place).lock) is not None
    return f"thinwire aggregator stop{home_option} && {start}" if running else start


def start_command(place: Path | None, reachable: bool = False, dashboard: str = "") -> str:
    """Return `aggregator start` with the options of the last start in `place`; without any if there was none.

    With `reachable` the device API listens where other machines reach it, on the port of the last start. With
    `dashboard` the dashboard listens at that address.
    """
    last = (StartOptions.load(place) if place else None) or StartOptions()
    if reachable:
        port = str(last.options.get("listen", "")).rpartition(":")[2]
        listen = f"0.0.0.0:{port if port.isdecimal() and int(port) else DEVICE_API_PORT}"
        last = replace(last, options={"listen": listen, **last.without("listen").options})
    if dashboard:
        last = replace(last, options={**last.without("no_dashboard").options, "dashboard": dashboard})
    return shlex.join(["aggregator", "start", *last.words()])
