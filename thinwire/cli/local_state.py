"""Where the aggregator of this machine is: its folder, its store, and whether it is alive."""

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
    from thinwire.core.statedir import AggregatorHome, find_home

    return AggregatorHome.under(find_home(home))


def has_database(place: AggregatorHome) -> bool:
    """Whether there is one; `DataLost` where runs lie there without it."""
    from thinwire.core.statedir import require_its_database

    require_its_database(place.database)
    return place.database.exists()


@contextmanager
def opened(home: Path | None, read_only: bool = True) -> Iterator[Store]:
    """The store, for one command; `NotFound` where nothing was ever run."""
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
    """Close the runs whose own process has died, so that what is shown of them is so; what cannot be changed stays."""
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
    """The store of an aggregator that was started here before: who only changes what is there makes none."""
    place = aggregator_home(home)
    if not has_database(place):
        raise _never_started(what, place, home)
    with opened(home, read_only) as store:
        yield store


def _never_started(what: str, place: AggregatorHome, home: Path | None) -> NotFound:
    from thinwire.core.errors import NotFound

    return NotFound(
        f"there are no {what} in {place.root}",
        why="no aggregator was ever started there",
        hint=again("aggregator start", home) + "; or name another folder: --home FOLDER",
    )


def operator() -> str:
    """Who types: the name that the audit shows."""
    import getpass

    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return f"uid {os.getuid()}"


def alive(home: Path | None) -> dict[str, Any] | None:
    """What the aggregator that is running on this folder wrote about itself, or None, also where one only starts."""
    from thinwire.core.clock import is_starting

    about = _holding(home)
    return None if about is None or is_starting(about) else about


def starting(home: Path | None) -> int | None:
    """The process of an aggregator that has this folder and does not serve yet."""
    from thinwire.core.clock import is_starting

    about = _holding(home)
    return int(about["pid"]) if about is not None and is_starting(about) else None


def _holding(home: Path | None) -> dict[str, Any] | None:
    """What the process that holds this folder wrote about itself.

    The lock is tried only while the process that wrote it lives: a try holds it for a moment, in which an aggregator
    that starts would be turned away.
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
    """That no aggregator is running here, and since when, by the clock: for a sentence, where `alive` gives None."""
    from thinwire.cli.console import moment
    from thinwire.core.clock import gone_since
    from thinwire.core.statedir import AggregatorHome, find_home

    at = gone_since(AggregatorHome(find_home(home) / "aggregator").lock)
    return f"no aggregator has been running since {moment(at)}" if at else "no aggregator is running"


def way_back(home: Path | None) -> str:
    """What brings an aggregator back where none is running: a command, or one that is starting already."""
    process = starting(home)
    return f"one is starting (process {process})" if process else again("aggregator start", home)


def require_alive(home: Path | None) -> dict[str, Any]:
    """The same, or `Unreachable` with the command that starts one."""
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
    """A command as it is typed for this state folder.

    >>> again("runs list", None), again("runs list", Path("here"))
    ('thinwire runs list', 'thinwire runs list --home here')
    """
    return f"thinwire {command}" + (f" --home {shlex.quote(str(home))}" if home else "")


# The words that were typed for `start`: a service is started with the same ones, in the same folder.


FILE = "start.json"
ONCE = ("--background", "--once")  # of a start by hand: a service is neither


@dataclass(frozen=True)
class Typed:
    """`words` stand behind `thinwire NOUN start`, and were typed in `folder`."""

    words: tuple[str, ...]
    folder: Path

    def with_option(self, option: str, value: str) -> Typed:
        """With an option that these words leave open."""
        return Typed((*self.words, option, value), self.folder)

    def remember(self, place: Path) -> None:
        """Keep them beside the state that they belong to."""
        from thinwire.core.statedir import write_atomically

        said = {"words": [word for word in self.words if word not in ONCE], "folder": str(self.folder)}
        write_atomically(place / FILE, json.dumps(said).encode())

    @classmethod
    def remembered(cls, place: Path) -> Typed | None:
        """Those of the last start here; None where it was never started, or the file is damaged."""
        try:
            said = json.loads((place / FILE).read_bytes())
            return cls(tuple(str(word) for word in said["words"]), Path(said["folder"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    @classmethod
    def now(cls) -> Typed:
        """Those of the command that runs (`thinwire.cli.main.main` hands them on); none where no command runs."""
        context = click.get_current_context(silent=True)
        said: Any = context.find_root().obj if context else None
        return cls(tuple(said or ())[2:], Path.cwd())


def understood(noun: str, verb: str, words: Sequence[str]) -> dict[str, Any]:
    """What `thinwire NOUN VERB` would make of these words; they are refused now, not at the next boot.

    It is looked for from the command that runs, so that a command needs to import no other.
    """
    root: Any = click.get_current_context().find_root().command
    command = root.commands[noun].commands[verb]
    return dict(command.make_context(f"thinwire {noun} {verb}", list(words)).params)
