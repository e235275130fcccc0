"""Which client of this machine is meant, and which aggregator it has joined."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.flower.device.trust import Trust

TRUST_FILE = "aggregator.json"  # what `client join` leaves (flower/device/trust.py)


def named(name: str | None) -> str:
    """A device's name: as given, else the machine's in our letters."""
    from thinwire.core.errors import UsageError
    from thinwire.core.types import DEVICE_NAME

    if name is None:
        name = re.sub(r"[^a-z0-9-]+", "-", platform.node().lower()).strip("-")[:63] or "device"
    if not DEVICE_NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} cannot be", why="a name has 1 to 63 of a-z, 0-9 and -", hint="--name lab-pi-03"
        )
    return name


def chosen(name: str | None, home: Path) -> str:
    """The client that a command without --name means: the one that has joined, else the one of this machine's name."""
    from thinwire.core.errors import UsageError

    if name is not None:
        return named(name)
    joined = sorted(path.parent.name for path in (home / "clients").glob(f"*/{TRUST_FILE}"))
    own = named(None)
    if len(joined) < 2 or own in joined:
        return joined[0] if len(joined) == 1 else own
    raise UsageError(
        "several clients of this machine have joined",
        why=", ".join(joined[:8]) + (" ..." if len(joined) > 8 else ""),
        hint=f"say which: --name {joined[0]}",
    )


def is_joined(aggregator: str | None) -> bool:
    """Whether who is reached at this address must have been joined: all but plain doors, on this machine."""
    return aggregator is None or aggregator.startswith("https://")


def trusted(aggregator: str | None, folder: Path) -> tuple[str, Trust | None]:
    """The address that is meant, and who is believed there; `UsageError` with the way to join where that is missing."""
    from thinwire.cli.addresses import aggregator_url
    from thinwire.core.errors import UsageError
    from thinwire.flower.device.trust import Trust

    trust = Trust.load(folder)
    if not is_joined(aggregator):
        return aggregator_url(aggregator or ""), None
    if trust is None:
        url = aggregator or "URL"
        raise UsageError(
            f"{folder.name} has not joined {aggregator or 'an aggregator'}",
            why="over TLS a device must know whom to trust, and be known",
            hint=f"thinwire client join {url} - --name {folder.name}"
            + ("" if aggregator else "; on the aggregator's own machine: --aggregator http://127.0.0.1:9090"),
        )
    return aggregator_url(aggregator or trust.url), trust


def joined_url(folder: Path) -> str | None:
    """The aggregator that this client has joined; None where it has not."""
    try:
        return str(json.loads((folder / TRUST_FILE).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
