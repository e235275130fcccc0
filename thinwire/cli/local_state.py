"""The aggregator on this machine: its state directory, its store, its process, and the words that it was started with.

The state directory of an aggregator or a client has a `start.json`: the words of its last `start`, and the folder in
which they were typed. A service is started with the same words in the same folder.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from thinwire.core.errors import NotFound
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import Store


def aggregator_home(home: Path | None) -> AggregatorHome:
    """Return the aggregator's state directory under `home`, or under the default one."""
    from thinwire.core.statedir import AggregatorHome, find_home

    return AggregatorHome.under(find_home(home))


def has_database(place: AggregatorHome) -> bool:
    """Return True if the aggregator has a database; `DataLost` if there are runs but no database."""
    from thinwire.core.statedir import require_its_database

    require_its_database(place.database)
    return place.database.exists()


@contextmanager
def opened(home: Path | None, read_only: bool = True) -> Iterator[Store]:
    """Open the store for one command.

    With `read_only` it is `NotFound` if no aggregator was ever started there; otherwise the store is created.
    """
    from thinwire.store import Store

    place = aggregator_home(home)
    if read_only and not has_database(place):
        raise _never_started("runs", place, home)
    store = Store.open(place.database, read_only=read_only)
    try:
        yield store
    finally:
        store.close()


def end_abandoned(home: Path | None) -> None:
    """Close the runs whose own process has died, so that their shown status is right.

    Errors are ignored: a run that does not close stays as it is.
    """
    from thinwire.core.errors import ThinwireError

    place = aggregator_home(home)
    if not has_database(place):
        return
    with opened(home) as store:
        if not store.owned():
            return
    from thinwire.server.run_end import end_abandoned as ended

    with suppress(ThinwireError), opened(home, read_only=False) as store:
        ended(store, place)


@contextmanager
def known(home: Path | None, read_only: bool, what: str = "devices") -> Iterator[Store]:
    """Open the store of an aggregator that was started before; `NotFound` otherwise, so that no command creates one."""
    place = aggregator_home(home)
    if not has_database(place):
        raise _never_started(what, place, home)
    with opened(home, read_only) as store:
        yield store


def _never_started(what: str, place: AggregatorHome, home: Path | None) -> NotFound:
    """Return the error for a state directory in which no aggregator was ever started."""
    from thinwire.core.errors import NotFound

    return NotFound(
        f"there are no {what} in {place.root}",
        why="no aggregator was ever started there",
        hint=again("aggregator start", home) + "; or name another folder: --home FOLDER",
    )


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
    return None if about is None or is_starting(about) else about


def starting(home: Path | None) -> int | None:
    """Return the process id of an aggregator that is starting on this directory and does not serve yet; else None."""
    from thinwire.core.clock import is_starting

    about = _holding(home)
    return int(about["pid"]) if about is not None and is_starting(about) else None


def _holding(home: Path | None) -> dict[str, Any] | None:
    """Return the description that the process with the directory's lock wrote about itself; None without one.

    Testing the lock holds it for a moment, which would refuse an aggregator that is starting. Therefore it is tested
    only while the process that wrote it lives.
    """
    from thinwire.core.statedir import AggregatorHome, find_home, holder

    lock = AggregatorHome(find_home(home) / "aggregator").lock
    try:
        os.kill(int(json.loads(lock.read_bytes() or b"{}")["pid"]), 0)
    except PermissionError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return holder(lock)


def absent(home: Path | None) -> str:
    """Return a sentence that no aggregator is running and since when, for callers to which `alive` returned None."""
    from thinwire.cli.console import moment
    from thinwire.core.clock import gone_since
    from thinwire.core.statedir import AggregatorHome, find_home

    at = gone_since(AggregatorHome(find_home(home) / "aggregator").lock)
    return f"no aggregator has been running since {moment(at)}" if at else "no aggregator is running"


def way_back(home: Path | None) -> str:
    """Return what brings an aggregator back: the start command, or a note that one is starting."""
    process = starting(home)
    return f"one is starting (process {process})" if process else again("aggregator start", home)


def require_alive(home: Path | None) -> dict[str, Any]:
    """Return the description of the running aggregator; `Unreachable` with the start command if none is running."""
    from thinwire.core.errors import Unreachable
    from thinwire.core.statedir import find_home

    if found := alive(home):
        return found
    if process := starting(home):
        raise Unreachable(
            "no aggregator is running yet", why=f"process {process} is starting one", hint="try again in a moment"
        )
    raise Unreachable(
        "no aggregator is running",
        why=f"nobody holds {find_home(home) / 'aggregator'}",
        hint=f"{again('aggregator start', home)}    (in another terminal)",
    )


def again(command: str, home: Path | str | None) -> str:
    """Return a command as it is typed for this state directory.

    >>> again("runs list", None), again("runs list", Path("here"))
    ('thinwire runs list', 'thinwire runs list --home here')
    """
    return f"thinwire {command}" + (f" --home {shlex.quote(str(home))}" if home else "")


FILE = "start.json"
ONCE = ("--background", "--once")  # options of a start by hand that make no sense for a service


@dataclass(frozen=True)
class Typed:
    """The words after `thinwire NOUN start`, and the folder in which they were typed."""

    words: tuple[str, ...]
    folder: Path

    def with_option(self, option: str, value: str) -> Typed:
        """Return these words with one more option."""
        return Typed((*self.words, option, value), self.folder)

    def remember(self, place: Path) -> None:
        """Write the words to start.json in the state directory `place`, without the options of `ONCE`."""
        from thinwire.core.statedir import write_atomically

        said = {"words": [word for word in self.words if word not in ONCE], "folder": str(self.folder)}
        write_atomically(place / FILE, json.dumps(said).encode())

    @classmethod
    def remembered(cls, place: Path) -> Typed | None:
        """Return the words of the last start in `place`; None if there was none or the file is damaged."""
        try:
            said = json.loads((place / FILE).read_bytes())
            return cls(tuple(str(word) for word in said["words"]), Path(said["folder"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    @classmethod
    def now(cls) -> Typed:
        """Return the words of the running command, which `thinwire.cli.main.main` passes on; none outside of one."""
        context = click.get_current_context(silent=True)
        said: Any = context.find_root().obj if context else None
        return cls(tuple(said or ())[2:], Path.cwd())


def understood(noun: str, verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse the words of `thinwire NOUN VERB` into its parameters, so that errors show now and not at the next boot.

    The command is found through the running command's context, so that no command has to import another one.
    """
    root: Any = click.get_current_context().find_root().command
    command = root.commands[noun].commands[verb]
    return dict(command.make_context(f"thinwire {noun} {verb}", list(words)).params)
