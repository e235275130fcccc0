"""`thinwire devices`: who may take part, who is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from thinwire.cli import say
from thinwire.cli.options import Home, Json

if TYPE_CHECKING:
    from thinwire.store import DeviceInfo

app = typer.Typer(name="devices", help="Devices: who may take part, who is there.", no_args_is_help=True)


@app.command(name="list")
def list_(json: Json = False, home: Home = None) -> None:
    """List the devices that this aggregator knows."""
    from thinwire.cli.places import aggregator_home, opened

    if not aggregator_home(home).database.exists():
        found: list[DeviceInfo] = []
    else:
        with opened(home) as store:
            found = list(store.devices())
    if json:
        say.document([_document(info) for info in found])
        return
    if not found:
        say.note("no devices yet; thinwire aggregator start prints the line that adds one")
        return
    header = ("device", "state", "online", "seen", "tasks", "updates", "payload up", "last")
    say.table(header, [_row(info) for info in found], right=header[5:7])


def _row(info: DeviceInfo) -> tuple[str, ...]:
    tasks = ", ".join(task["name"] + (" (broken)" if task.get("error") else "") for task in info.tasks)
    online, seen = "yes" if info.online else "no", say.ago(info.seen_at)
    return (
        info.row.name,
        info.row.state,
        online,
        seen,
        tasks,
        str(info.updates),
        say.size(info.payload_up),
        info.last_outcome,
    )


def _document(info: DeviceInfo) -> dict[str, Any]:
    return {
        "name": info.row.name,
        "state": info.row.state,
        "how": info.row.how,
        "fingerprint": info.row.fingerprint,
        "online": info.online,
        "seen_at": info.seen_at,
        "tasks": list(info.tasks),
        "updates": info.updates,
        "payload_up": info.payload_up,
        "last_outcome": info.last_outcome,
    }
