"""What the clients of this machine are doing: from their locks, their status files and their outboxes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.cli import say

SHOWN_SKEW_S = 1.0  # less is no cause of anything
KEY_FILE = "key.pem"  # flower/device/keys.py, which takes long to import


def began(home: Path) -> list[str]:
    """The clients that have joined or started here; one whose join was refused has left its lock and no more."""
    found = (path for path in (home / "clients").glob("*/") if (path / "lock").exists())
    return sorted(path.name for path in found if {one.name for one in path.iterdir()} - {"lock", KEY_FILE})


def look(home: Path, name: str) -> dict[str, Any]:
    """One client, as `--json` gives it. `state` is "stopped" when no process holds its folder."""
    from thinwire.cli.client.joined import joined_url
    from thinwire.client.link.standing import Standing
    from thinwire.core.home import holder

    folder = home / "clients" / name
    about = holder(folder / "lock")
    standing = asdict(Standing.load(folder) or Standing())
    if about is None:
        standing |= {"state": "stopped", "connected_at": None}
    found = {"name": name, "running": about is not None, **standing, "pending": pending(folder)}
    return found | {"aggregator": joined_url(folder)} | (about or {})


def pending(folder: Path) -> int:
    """Answers that are kept until the aggregator has said what became of them."""
    count = 0
    for path in folder.glob("runs/*/state.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            count += len(json.loads(path.read_bytes())["outbox"])
    return count


def show(rows: list[dict[str, Any]]) -> None:
    """One line a client, then what went wrong last at each."""
    header = ("client", "state", "connected", "process", "run", "round", "pending", "aggregator")
    cells = [
        (
            row["name"],
            row["state"],
            say.ago(row["connected_at"]).removesuffix(" ago"),
            row.get("pid"),
            row["run"],
            row["round"] or None,
            row["pending"],
            row["aggregator"],
        )
        for row in rows
    ]
    say.table(header, cells, right=("process", "round", "pending"))
    for row in rows:
        if row["last_error"]:
            say.line(f"{row['name']}: {say.ago(row['last_error_at'])}: {row['last_error']}")
        if abs(row["skew_s"] or 0.0) >= SHOWN_SKEW_S:
            way = "behind" if row["skew_s"] > 0 else "ahead of"
            say.line(f"{row['name']}: its clock is {say.seconds(abs(row['skew_s']))} {way} the aggregator's")
