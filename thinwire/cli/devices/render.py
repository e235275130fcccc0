"""Devices, invitations and the audit log as tables and as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.cli.devices.invitations import DoorPlace
from thinwire.core.formatting import speed, trip
from thinwire.core.types import GIB

if TYPE_CHECKING:
    from thinwire.core.fleet import DeviceRow
    from thinwire.store import DeviceAction, DeviceInfo, DoorNote, InvitationRow, Invited, MeasureRow

LINK = ("down", "up", "rtt")  # kinds of measures
SHORT = 16  # hex digits of a fingerprint in a table: enough to tell devices apart, not to approve one by


def nothing(json: bool, tls: bool = False) -> None:
    """Print that there are no devices, and the command that adds one."""
    if json:
        console.document([])
    else:
        adds = "thinwire devices invite adds one" if tls else "thinwire aggregator start prints the line that adds one"
        console.note(f"no devices yet; {adds}")


def counts_as(row: DeviceRow, tls: bool) -> str:
    """Return the state in which the device API treats a row.

    With `tls` the device API is open to other machines, and enrollment over loopback alone approves no device.
    """
    return "pending" if tls and row.how == "loopback" and row.state == "approved" else row.state


@dataclasses.dataclass(frozen=True)
class Known:
    """The aggregator's own state, without which it is unknown which devices are online.

    `alive`: it is running. `gone_at`: when it was last running, wall clock; 0 if unknown. `tls`: its device API is open
    to other machines. `heard_by`: the last contact of each device, wall clock.
    """

    alive: bool = True
    gone_at: float = 0.0
    tls: bool = False
    heard_by: Mapping[str, float] = dataclasses.field(default_factory=dict)  # core/clock.py

    def heard_at(self, info: DeviceInfo) -> float | None:
        """Return the last contact of a device as wall-clock seconds; None without any.

        For online devices a running aggregator writes it every few seconds.
        """
        if not info.online:
            return info.heard_at
        if at := self.heard_by.get(info.row.name):
            return max(at, info.heard_at or 0.0)
        return time.time() if self.alive else max(self.gone_at, info.heard_at or 0.0)

    def heard(self, info: DeviceInfo) -> str:
        """Return the last contact of a device in words."""
        is_now = info.online and self.alive and info.row.name not in self.heard_by  # it connected later
        return "now" if is_now else console.ago(self.heard_at(info))


def devices(found: Sequence[DeviceInfo], known: Known, json: bool) -> None:
    """Print all devices, then the fingerprints of those that wait for approval."""
    if json:
        console.document([document(info, known) for info in found])
    elif not found:
        nothing(json, known.tls)
    else:
        header = (
            "device", "state", "how", "fingerprint", "online", "heard", "has", "tasks", "updates", "payload up", "last",
        )  # fmt: skip
        console.table(header, [_row(info, known) for info in found], right=header[8:10])
        for row in (info.row for info in found if counts_as(info.row, known.tls) == "pending"):
            console.line(
                f"{row.name} waits to be approved; the fingerprint of its key: {console.grouped(row.fingerprint)}"
            )


def document(info: DeviceInfo, known: Known) -> dict[str, Any]:
    """Return a device as JSON types."""
    return {
        "name": info.row.name,
        "state": info.row.state,
        "how": info.row.how,
        "fingerprint": info.row.fingerprint,
        "online": info.online if known.alive else None,
        "seen_at": info.seen_at,
        "heard_at": known.heard_at(info),
        "has": dataclasses.asdict(info.has),
        "tasks": list(info.tasks),
        "updates": info.updates,
        "payload_up": info.payload_up,
        "last_outcome": info.last_outcome,
    }


def one(info: DeviceInfo, links: Sequence[MeasureRow], known: Known, json: bool) -> None:
    """Print one device with the measurements of its link; capabilities that it did not report are shown as unknown."""
    if json:
        measured = {row.kind: {"p50": row.p50, "p90": row.p90, "samples": len(row.samples)} for row in links}
        console.document(document(info, known) | {"versions": info.hello.get("versions", {}), "measured": measured})
        return
    has, unknown = info.has, "unknown"
    power = {None: unknown, True: "mains", False: "battery"}[has.mains]
    link = {None: unknown, True: "metered", False: "unmetered"}[has.metered]
    memory = [unknown if count is None else f"{count / GIB:.1f} GiB" for count in (has.free_bytes, has.memory_bytes)]
    rows = {
        "state": f"{counts_as(info.row, known.tls)} ({info.row.how})",
        "fingerprint": console.grouped(info.row.fingerprint),
        "online": ("yes" if info.online else "no") if known.alive else unknown,
        "connected": console.ago(info.seen_at), "heard": known.heard(info),
        "cores": unknown if has.cores is None else str(has.cores), "memory free": f"{memory[0]} of {memory[1]}",
        "power": power, "link": link, **_measured(links),
        "runs": ", ".join(f"{name} {version}" for name, version in info.hello.get("versions", {}).items()),
        "tasks": _tasks(info), "updates": f"{info.updates}, {console.size(info.payload_up)}", "last": info.last_outcome,
    }  # fmt: skip
    console.line(info.row.name)
    for name, value in rows.items():
        console.sentence(value or console.NOTHING, begin=f"  {name:<12} ")


def _measured(links: Sequence[MeasureRow]) -> dict[str, str]:
    """Return the link's figures by name: the median, and the bound that nine of ten measurements kept."""
    rows, of = {}, {row.kind: row for row in links}
    for kind, name, word, most in (("rtt", "round trip", trip, "at most"), ("up", "upload", speed, "at least"),
                                   ("down", "download", speed, "at least")):  # fmt: skip
        row = of.get(kind)
        if row is None:
            rows[name] = "not measured"
        elif row.p50 is None or row.p90 is None:
            rows[name] = "too little was sent to tell" if row.least else "too fast to be measured"
        elif row.least:
            rows[name] = f"at least {word(row.p50)} (too little was sent to tell, the last {len(row.samples)} times)"
        else:
            rows[name] = f"{word(row.p50)}, nine of ten {most} {word(row.p90)} (of the last {len(row.samples)})"
    return rows


def log(actions: Sequence[DeviceAction], notes: Sequence[DoorNote], json: bool) -> None:
    """Print the audit log, then the refusals of the device API, newest first."""
    if json:
        said = {"actions": [dataclasses.asdict(a) for a in actions], "refused": [dataclasses.asdict(n) for n in notes]}
        console.document(said)
        return
    rows = [(console.moment(a.at), a.who, a.what, a.device, a.detail) for a in actions]
    console.table(("when", "who", "what", "device", "detail"), rows)
    if notes:
        console.line()
        refused = [(console.moment(n.at), n.address, n.kind, n.name, n.why) for n in notes]
        console.table(("refused", "address", "kind", "called itself", "why"), refused)


def invited(door: DoorPlace, made: Sequence[Invited], by_hand: bool, json: bool) -> None:
    """Print new invitations with the command to paste; their secrets are shown only this once."""
    if json:
        console.document([{**door.row(one), "urls": list(door.urls), "expires_at": one.expires_at} for one in made])
        return
    for one in made:
        console.line(
            f"invitation {one.id} for {one.name or 'any name'}, good once, until {console.moment(one.expires_at)}"
        )
        console.line(f"  {door.text(one)}")
        console.line("  on the device, which reads the invitation from standard input (paste it, then Enter):")
        console.line(f"    {door.command(one)}")
    if len(door.urls) > 1:
        console.note(f"the door is also at {', '.join(door.urls[1:])}")
    _approval(by_hand)


def _approval(by_hand: bool) -> None:
    """Note the approval that a device of these invitations needs."""
    if by_hand:
        console.note("who comes waits for: thinwire devices approve NAME; compare the fingerprint that both ends print")


def written(path: Path, made: Sequence[Invited], by_hand: bool, json: bool) -> None:
    """Print that the invitations were written to a file."""
    if json:
        console.document({"file": str(path), "ids": [one.id for one in made], "expires_at": made[0].expires_at})
    else:
        many = f"{len(made)} invitations, each" if len(made) > 1 else "1 invitation,"
        console.line(f"{path}: {many} good once, until {console.moment(made[0].expires_at)}")
        console.note("whoever reads that file can join: hand the lines out and delete it")
        _approval(by_hand)


def invitations(rows: Sequence[InvitationRow], withdrawn: int | None, json: bool) -> None:
    """Print the list of invitations, or the one that was withdrawn."""
    if withdrawn is not None:
        if json:
            console.document(next(dataclasses.asdict(row) for row in rows if row.id == withdrawn))
        else:
            console.line(f"invitation {withdrawn} is withdrawn: nobody can join with it")
    elif json:
        console.document([dataclasses.asdict(row) for row in rows])
    elif not rows:
        console.note("no invitations yet: thinwire devices invite")
    else:
        cells = [
            (r.id, r.name or "any", r.state, "by hand" if r.approve_manually else "at once",
             console.moment(r.expires_at),
             r.used_by, console.moment(r.used_at), r.who)
            for r in rows
        ]  # fmt: skip
        console.table(
            ("id", "name", "state", "approved", "expires", "used by", "used", "made by"), cells, right=("id",)
        )


def _row(info: DeviceInfo, known: Known) -> tuple[str, ...]:
    """Return the cells of a device in the list."""
    tasks = _tasks(info)
    state, online = counts_as(info.row, known.tls), ("yes" if info.online else "no") if known.alive else ""
    return (
        info.row.name, state, info.row.how, info.row.fingerprint[:SHORT], online, known.heard(info),
        info.has.sentence, tasks, str(info.updates), console.size(info.payload_up), info.last_outcome,
    )  # fmt: skip


def _tasks(info: DeviceInfo) -> str:
    """Return the names of a device's tasks, with broken ones marked."""
    return ", ".join(task["name"] + (" (broken)" if task.get("error") else "") for task in info.tasks)
