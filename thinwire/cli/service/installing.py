"""`thinwire client service` and `thinwire aggregator service`: the start that was typed, kept going by systemd."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.cli import say
from thinwire.cli.service.systemd import Systemd
from thinwire.cli.service.typed import Typed
from thinwire.cli.service.unit import Unit

KEPT = ("PYTHONPATH", "THINWIRE_LISTEN", "THINWIRE_PAGE", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy")


def install(unit: Unit, manager: Systemd, lock: Path, printed: bool) -> None:
    """Print the unit, or put it in place and start it."""
    from thinwire.core.errors import ThinwireError
    from thinwire.core.home import holder, private_folder

    if printed:
        say.line(unit.text().rstrip())
        return
    running = holder(lock)
    if running and not manager.has(unit.file):
        raise ThinwireError(
            f"{unit.says} is running already, as process {running.get('pid')}",
            why="the service would find its folder held",
            hint=f"end it first: kill {running.get('pid')}",
        )
    manager.require()
    private_folder(unit.state)
    path = manager.install(unit.file, unit.text())
    say.line(f"service  {unit.name}, started; it is started again whenever it ends, but not after 2, 3, 5 or 8")
    say.line(f"unit     {path}")
    say.line(f"command  {' '.join(unit.command)}")
    say.line(f"look     {manager.command} status {unit.name}; {manager.journal} -u {unit.name} -f")
    if not manager.system:
        say.line("boot     a user's services start at login; to have it at boot: loginctl enable-linger")


def uninstall(name: str, manager: Systemd) -> None:
    """Take the unit away and say what stays."""
    path = manager.uninstall(f"{name}.service")
    say.line(f"stopped and taken away: {path}; the state folder stays as it is")


def unit_of(
    name: str, says: str, noun: str, typed: Typed, state: Path, home: Path, manager: Systemd, **more: Any
) -> Unit:
    """The unit for `thinwire NOUN start` with these words."""
    return Unit(
        name, says, (*_program(), noun, "start", *typed.words), typed.folder, state,
        {"THINWIRE_HOME": str(home), **_environment(os.environ)}, _owner(home) if manager.system else "", **more,
    )  # fmt: skip


def words_of(given: Sequence[str], place: Path) -> Typed:
    """What was typed behind `service install`, else what the last start here was typed with."""
    return Typed(tuple(given), Path.cwd()) if given else Typed.remembered(place) or Typed((), Path.cwd())


def home_of(home: Path | None, system: bool) -> Path:
    """The state folder; under sudo it is that of the user who typed it."""
    from thinwire.core.home import find_home

    user = os.environ.get("SUDO_USER")
    if system and user and not home and not os.environ.get("THINWIRE_HOME"):
        return Path(pwd.getpwnam(user).pw_dir) / ".local" / "state" / "thinwire"
    return find_home(home)


def _program() -> tuple[str, ...]:
    beside = shutil.which("thinwire", path=os.path.dirname(sys.executable))
    return (beside,) if beside else (sys.executable, "-m", "thinwire.cli")


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the words mean depends on these. An address with a password is left out: everybody may read a unit."""
    return {name: environ[name] for name in KEPT if environ.get(name) and "@" not in environ[name]}


def _owner(home: Path) -> str:
    """Who owns the state folder, or the nearest that is there of it."""
    there = next(path for path in (home, *home.parents) if path.exists())
    return pwd.getpwuid(there.stat().st_uid).pw_name
