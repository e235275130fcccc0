"""Whether an aggregator serves the folder whose database is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from thinwire.core.heartbeat import is_starting
from thinwire.core.home import AggregatorHome, holder

State = Literal["running", "gone", "unknown"]


def lock_beside(url: str) -> Path | None:
    """The lock of the state folder that this database lies in; None for a server's, or where no aggregator was."""
    home = AggregatorHome(Path(url.removeprefix("sqlite:///")).parent)
    return home.lock if url == f"sqlite:///{home.database}" and home.lock.exists() else None


def aggregator(lock: Path | None) -> tuple[State, dict[str, Any]]:
    """Its state and what it wrote about itself (pid, addresses); "unknown" where we were given no lock to look at.

    One that only starts is "gone".

    The lock is tried only while the process that wrote it is alive: a try holds it for a moment, in which an
    aggregator that starts would be turned away.
    """
    if lock is None:
        return "unknown", {}
    try:
        about = json.loads(lock.read_bytes() or b"{}")
        os.kill(int(about["pid"]), 0)
    except PermissionError:
        return ("gone", {}) if is_starting(about) else ("running", about)
    except (OSError, ValueError, KeyError, TypeError):
        return "gone", {}
    found = holder(lock)
    return ("gone", {}) if found is None or is_starting(found) else ("running", found)
