"""`thinwire client leave`: the row is marked at the aggregator first; only then the key goes, and what was learned."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.cli import say
from thinwire.cli.client.joined import joined_url
from thinwire.cli.places import again


def leave(name: str, home: Path | None, force: bool) -> None:
    """Mark the row at the aggregator, then delete the key and all that was made from local data.

    `force`: also where nobody there could be told.
    """
    from thinwire.cli.service.client import service
    from thinwire.client.disk.learned import delete_learned
    from thinwire.core.errors import NotFound, Refused, ThinwireError
    from thinwire.core.home import find_home, hold, holder, sync_folder
    from thinwire.flower import FlowerLink, device_key
    from thinwire.flower.device.keys import KEY_FILE
    from thinwire.flower.device.trust import TRUST_FILE, Trust

    folder = find_home(home) / "clients" / name
    if not (folder / KEY_FILE).exists():
        raise NotFound(
            f"no client {name!r} is known anywhere", why=f"there is no key in {folder}",
            hint=f"{again('client status', home)} lists those of this machine",
        )  # fmt: skip
    stop = service(name)
    if about := holder(folder / "lock"):
        raise _runs(about, name, home, stop)
    if stop:
        say.note(f"its service would start again without a key: {stop}")
    with hold(folder / "lock", {"leaving": name}):
        url = aggregator_of(folder)
        try:
            trust = Trust.load(folder)
            with contextlib.closing(FlowerLink(url or "", device_key(folder), name, folder, trust)) as link:
                link.leave()
            say.line(f"{name} has left {url}: nobody can come with its key any more")
        except Refused as refused:
            say.line(f"{name} was shut out of {url} before: {refused.why}")
        except ThinwireError as error:
            if not force:
                raise _not_told(error, name, home) from error
            say.note(error.text())
            say.line(f"{url} does not know it yet; its operator can: thinwire devices revoke {name}")
        delete_learned(folder)  # the key last: while it is here this command can be typed again
        for file in (KEY_FILE, TRUST_FILE):
            (folder / file).unlink(missing_ok=True)
        sync_folder(folder)
    say.line("its key is deleted, and with it what it learned here: updates, residuals, models, plans and logs")
    say.line(f"the data that it trained on were not touched; its settings stay in {folder}")


def aggregator_of(folder: Path) -> str | None:
    """The aggregator that was joined, else the one that the last start was typed with."""
    from thinwire.cli.service.typed import Typed, understood

    if (url := joined_url(folder)) is not None:
        return url
    typed = Typed.remembered(folder)
    found: Any = understood("client", "start", typed.words)["aggregator"] if typed else None
    return str(found) if found else None


def _runs(about: Mapping[str, Any], name: str, home: Path | None, stop: str) -> Exception:
    """Its key is in use: first it is stopped. `stop` takes its service away, which would start it again."""
    from thinwire.core.errors import ThinwireError

    pid = about.get("pid", "?")
    first = stop or f"Ctrl-C where it runs, or kill {pid}"
    return ThinwireError(
        f"{name} is running: process {pid}", why="it would go on with a key that nobody takes any more",
        hint=f"stop it first ({first}), then: {again(f'client leave --name {name}', home)}",
    )  # fmt: skip


def _not_told(error: Any, name: str, home: Path | None) -> Exception:
    from thinwire.core.errors import Unreachable

    return Unreachable(
        f"{name} has not left, and its key is still here: {error.what}", why=error.why,
        hint=f"try again; or delete the key all the same: {again(f'client leave --name {name} --force', home)}",
    )  # fmt: skip
