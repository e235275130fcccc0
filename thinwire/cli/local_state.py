"""The aggregator and the clients on this machine: state directories, the store, processes, and options of a last start.

Every command about a client uses this file's rules for its name (`choose_client`) and its aggregator (`trusted`). An
aggregator reached by https must have been joined; http is for loopback, on the aggregator's own machine.

The state directory of an aggregator or a client has a `start.json`: the options of its last `start`, and the folder in
which it was typed. A service is started with the same options in the same folder.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from thinwire.core.start_options import StartOptions, start_command

if TYPE_CHECKING:
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import Store
    from thinwire.transport.device.identity import Trust


def aggregator_home(home: Path | None) -> AggregatorHome:
    """Return the aggregator's state directory under `home`, or under the default one."""
    from thinwire.core.statedir import AggregatorHome, find_home

    return AggregatorHome.under(find_home(home))


def has_database(place: AggregatorHome) -> bool:
    """Return True if the aggregator has a database; `DataLost` if there are runs but no database."""
    from thinwire.core.statedir import require_its_database

    require_its_database(place.database)
    return place.database.exists()


def require_home(home: Path | None) -> None:
    """Raise NotFound if a command names a home that does not exist: a list of what is there would be empty."""
    if home is not None and not home.exists():
        from thinwire.core.errors import NotFound

        raise NotFound(
            f"there is no folder {home}",
            why="--home names the folder in which an aggregator keeps its runs and devices",
            hint="the folder that the aggregator was started with; "
            + command_line("aggregator start", home)
            + " makes one",
        )


@contextmanager
def open_store(home: Path | None, read_only: bool = True, create: bool = False) -> Iterator[Store]:
    """Open the store for one command; `NotFound` if no aggregator was ever started there, unless `create`."""
    from thinwire.core.errors import NotFound
    from thinwire.store import Store

    if not create:
        require_home(home)
    place = aggregator_home(home)
    if not create and not has_database(place):
        raise NotFound(
            f"there are no runs and no devices in {place.root}",
            why="no aggregator was ever started there",
            hint=command_line("aggregator start", home) + "; or name another folder: --home FOLDER",
        )
    store = Store.open(place.database, read_only=read_only)
    try:
        yield store
    finally:
        store.close()


def end_abandoned(home: Path | None) -> None:
    """Close the runs whose own process has died, so that their shown status is right.

    Errors are ignored: a run that does not close stays as it is. Raise NotFound if `--home` names no folder.
    """
    from thinwire.core.errors import ThinwireError

    require_home(home)
    place = aggregator_home(home)
    if not has_database(place):
        return
    with open_store(home) as store:
        if not store.owned():
            return
    from thinwire.server.run_end import end_abandoned as ended

    with suppress(ThinwireError), open_store(home, read_only=False) as store:
        ended(store, place)


def operator() -> str:
    """Return the name of the user who types, for the audit log."""
    import getpass

    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return f"uid {os.getuid()}"


def alive(home: Path | None) -> dict[str, Any] | None:
    """Return the running aggregator's description of itself; None if none is running or one is starting."""
    from thinwire.core.clock import is_starting

    about = _holding(home)
    if about is None or is_starting(about):
        return None
    from thinwire.core.statedir import AggregatorHome, find_home

    page = dashboard_of(AggregatorHome(find_home(home) / "aggregator"))
    return {**about, "dashboard": page["dashboard"], "dashboard_url": page["url"]} if page else about


def dashboard_of(place: AggregatorHome) -> dict[str, Any] | None:
    """Return what the running dashboard says of itself (pid, dashboard: its address); None if none listens."""
    from thinwire.core.statedir import living_holder

    about = living_holder(place.dashboard_lock)
    return about if about and about.get("dashboard") else None


def starting(home: Path | None) -> int | None:
    """Return the process id of an aggregator that is starting on this directory and does not serve yet; else None."""
    from thinwire.core.clock import is_starting

    about = _holding(home)
    return int(about["pid"]) if about is not None and is_starting(about) else None


def _holding(home: Path | None) -> dict[str, Any] | None:
    """Return the description that the process with the directory's lock wrote about itself; None without one."""
    from thinwire.core.statedir import AggregatorHome, find_home, living_holder

    return living_holder(AggregatorHome(find_home(home) / "aggregator").lock)


def absence_text(home: Path | None) -> str:
    """Return a sentence that no aggregator is running and since when, for callers to which `alive` returned None."""
    from thinwire.cli.console import moment
    from thinwire.core.clock import down_since_of
    from thinwire.core.statedir import AggregatorHome, find_home

    at = down_since_of(AggregatorHome(find_home(home) / "aggregator").lock)
    return f"no aggregator has been running since {moment(at)}" if at else "no aggregator is running"


def start_hint(home: Path | None) -> str:
    """Return what brings an aggregator back: the start command, or a note that one is starting."""
    process = starting(home)
    return f"one is starting (process {process})" if process else start_again(home)


def start_again(home: Path | None) -> str:
    """Return the command that starts the aggregator as it was started last, with the same addresses."""
    from thinwire.core.statedir import AggregatorHome, find_home

    return command_line(start_command(AggregatorHome(find_home(home) / "aggregator").root), home)


def require_alive(home: Path | None) -> dict[str, Any]:
    """Return the description of the running aggregator; `Unreachable` with the start command if none is running."""
    from thinwire.core.errors import Unreachable
    from thinwire.core.statedir import find_home

    if found := alive(home):
        return found
    if process := starting(home):
        raise Unreachable(
            "no aggregator is running yet",
            why=f"process {process} is starting one",
            hint="the same command in a moment",
        )
    raise Unreachable(
        "no aggregator is running",
        why=f"no process has locked {find_home(home) / 'aggregator'}",
        hint=f"{start_again(home)}    (in another terminal)",
    )


def adds_device(about: Mapping[str, Any], home: Path | None, task: str = "NAME") -> str:
    """Return the command that adds a device to the running aggregator that describes itself as `about`."""
    client = f"client start --aggregator http://{about['listen']} --task {task}=MODULE --name NAME"
    return command_line("devices invite" if about.get("pin") else client, home)


SILENT_S = 20.0  # without a sign of life, of which there is one each BEAT_S


def require_responding(home: Path | None) -> None:
    """Raise `Unreachable` if an aggregator holds the state directory and shows no sign of life: it will do nothing."""
    import time

    from thinwire.core.clock import is_starting, last_beat
    from thinwire.core.errors import Unreachable
    from thinwire.core.formatting import duration
    from thinwire.core.statedir import AggregatorHome, find_home

    about, place = _holding(home), AggregatorHome(find_home(home) / "aggregator")
    if about and not is_starting(about) and (silent_s := time.time() - last_beat(place.lock)) > SILENT_S:
        raise Unreachable(
            "the aggregator does not respond",
            why=f"process {about['pid']} holds {place.root}, and its last sign of life is {duration(silent_s)} old",
            hint=f"kill -CONT {about['pid']} if it was stopped, or kill -9 {about['pid']}; then the same command again",
        )


def command_line(command: str, home: Path | str | None) -> str:
    """Return a command as it is typed for this state directory.

    >>> command_line("runs list", None), command_line("runs list", Path("here"))
    ('thinwire runs list', 'thinwire runs list --home here')
    """
    return f"thinwire {command}" + (f" --home {shlex.quote(str(home))}" if home else "")


TRUST_FILE = "aggregator.json"  # written by `client join` (transport/device/identity.py)


def device_name(name: str | None) -> str:
    """Return the device's name: the given one, else the host name in the letters that a name may have.

    `UsageError` if the given name is invalid.
    """
    from thinwire.core.types import require_device_name

    if name is None:
        name = re.sub(r"[^a-z0-9-]+", "-", platform.node().lower()).strip("-")[:63] or "device"
    return require_device_name(name, "--name lab-pi-03")


KEY_FILE = "key.pem"  # copied from transport/device/identity.py, whose import is slow


def client_names(home: Path) -> list[str]:
    """Return the names of the clients that have joined or started here, sorted.

    A refused join leaves at most a lock and a key, and does not count.
    """
    return sorted(path.parent.name for path in (home / "clients").glob("*/lock") if _keeps(path.parent))


def _keeps(folder: Path) -> bool:
    """Return True if a client has left something in its folder beside its lock and its key."""
    return folder.is_dir() and bool({one.name for one in folder.iterdir()} - {"lock", KEY_FILE})


def choose_client(name: str | None, home: Path) -> str:
    """Return the client that a command without `--name` means: the only one here, else that with the host name.

    If some have joined, only those count. `UsageError` if there are several and none has the host name.
    """
    from thinwire.core.errors import UsageError

    if name is not None:
        return device_name(name)
    there = sorted(path.parent.name for path in (home / "clients").glob(f"*/{TRUST_FILE}")) or client_names(home)
    own = device_name(None)
    if len(there) < 2 or own in there:
        return there[0] if len(there) == 1 else own
    raise UsageError(
        "there are several clients on this machine",
        why=_listed(there),
        hint=f"say which: --name {there[0]}",
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and three dots for the others."""
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


def client_here(name: str | None, home: Path) -> tuple[str, Path]:
    """Return the name and the folder of the client that a command means; `NotFound` if it was never here."""
    from thinwire.core.errors import NotFound

    called, there, clients = choose_client(name, home), client_names(home), home / "clients"
    if not _keeps(clients / called):
        why = f"in {clients} there are {_listed(there)}" if there else f"no client was ever started in {clients}"
        hint = f"--name {there[0]}, for instance" if there else "thinwire client start"
        raise NotFound(f"no client {called!r} here", why=why, hint=hint)
    return called, clients / called


def is_joined(aggregator: str | None) -> bool:
    """Return True if a client must have joined to reach this address: without an address, or over https."""
    return aggregator is None or aggregator.startswith("https://")


def trusted(aggregator: str | None, folder: Path) -> tuple[str, Trust | None]:
    """Return the aggregator's URL and the CAs to trust there, which are None over http.

    `UsageError` with the join command if the client at `folder` has not joined.
    """
    from thinwire.cli.params import aggregator_url
    from thinwire.core.errors import UsageError
    from thinwire.transport.device.identity import Trust

    trust = Trust.load(folder)
    if not is_joined(aggregator):
        return aggregator_url(aggregator or ""), None
    if trust is None:
        url, here = aggregator or "URL", (alive(folder.parents[1]) or {}).get("listen", "127.0.0.1:9090")
        raise UsageError(
            f"{folder.name} has not joined {aggregator or 'an aggregator'}",
            why="over TLS a device must know whom to trust, and be known",
            hint=f"thinwire client join {url} - --name {folder.name}"
            + ("" if aggregator else f"; on the aggregator's own machine: --aggregator http://{here}"),
        )
    return aggregator_url(aggregator or trust.url), trust


def joined_url(folder: Path) -> str | None:
    """Return the URL of the aggregator that this client has joined; None if it has not."""
    try:
        return str(json.loads((folder / TRUST_FILE).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def options_of_this_command() -> StartOptions:
    """Return the options of the running command; none outside of one."""
    context = click.get_current_context(silent=True)
    return _given(context) if context else StartOptions()


def parsed_options(noun: str, words: Sequence[str]) -> StartOptions:
    """Parse the words after `thinwire NOUN start`, so that errors show now and not at the next boot.

    The command is found through the running command's context, so that no command has to import another one.
    """
    root: Any = click.get_current_context().find_root().command
    return _given(root.commands[noun].commands["start"].make_context(f"thinwire {noun} start", list(words)))


def _given(context: click.Context) -> StartOptions:
    """Return the options that were typed or stand in the environment; a path is as it was typed."""
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return StartOptions({
        name: str(value) if isinstance(value, Path) else value  # an option with a callback is a Path already
        for name, value in context.params.items()
        if context.get_parameter_source(name) in given
    })  # fmt: skip
