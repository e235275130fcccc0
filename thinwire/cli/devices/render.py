"""Print devices, their audit log, and invitations with the command to paste on the device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.core import formatting
from thinwire.core.equipment import GIB
from thinwire.core.formatting import duration, speed
from thinwire.core.invitation import InviteAddress

if TYPE_CHECKING:
    from thinwire.store import DeviceAction, DeviceInfo, InvitationRow, Invited, MeasureRow, RefusalNote


SHORT = 16  # hex digits of a fingerprint in a table: enough to tell devices apart, not to approve one by


def print_no_devices(json: bool, add: str = "") -> None:
    """Print that there are no devices, and `add`, the command that adds one to a running aggregator."""
    if json:
        console.document([])
    else:
        how = f"to add one: {add}" if add else "thinwire aggregator start prints the line that adds one"
        console.note(f"no devices yet; {how}")


@dataclasses.dataclass(frozen=True)
class AggregatorState:
    """The state of the aggregator, without which it is unknown which devices are online.

    `alive`: it is running. `down_since`: when it was last running, wall clock; 0 if unknown. `tls`: its device API is
    open to other machines. `last_contacts`: the last contact of each device, wall clock. `add`: the command that adds a
    device to a running one.
    """

    alive: bool = True
    down_since: float = 0.0
    tls: bool = False
    last_contacts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # reports/privacy.py
    add: str = ""

    def last_seen_at(self, info: DeviceInfo) -> float | None:
        """Return the last contact of a device as wall-clock seconds; None without any.

        For online devices a running aggregator writes it every few seconds.
        """
        if not info.online:
            return info.last_seen_at
        if at := self.last_contacts.get(info.row.name):
            return max(at, info.last_seen_at or 0.0)
        return time.time() if self.alive else max(self.down_since, info.last_seen_at or 0.0)

    def presence(self, info: DeviceInfo, unknown: str) -> str:
        """Return online, suspect or offline, as the dashboard says it; `unknown` while no aggregator runs."""
        from thinwire.core.link_state import presence

        return presence(info.online, self.last_seen_at(info), time.time()) if self.alive else unknown

    def last_seen(self, info: DeviceInfo) -> str:
        """Return the last contact of a device in words."""
        is_now = info.online and self.alive and info.row.name not in self.last_contacts  # it connected later
        return "now" if is_now else console.ago(self.last_seen_at(info))


def print_devices(found: Sequence[DeviceInfo], aggregator: AggregatorState, json: bool) -> None:
    """Print all devices, then the fingerprints of those that wait for approval."""
    if json:
        console.document([device_document(info, aggregator) for info in found])
    elif not found:
        print_no_devices(json, aggregator.add)
    else:
        header: tuple[str, ...] = (
            "device", "state", "how", "fingerprint", "presence", "last seen", "has", "tasks", "updates", "payload up",
            "last outcome",
        )  # fmt: skip
        rows: list[tuple[str, ...]] = [_row(info, aggregator) for info in found]
        if any(info.tags for info in found):
            header = (*header, "tags")
            rows = [(*row, " ".join(info.tags)) for row, info in zip(rows, found, strict=True)]
        console.table(header, rows, right=header[8:10])
        for row in (info.row for info in found if info.row.standing(aggregator.tls) == "pending"):
            console.line(
                f"{row.name} waits to be approved; the fingerprint of its key: {formatting.grouped(row.fingerprint)}"
            )


def device_document(info: DeviceInfo, aggregator: AggregatorState) -> dict[str, Any]:
    """Return a device as JSON types."""
    return {
        "name": info.row.name,
        "state": info.row.state,
        "how": info.row.how,
        "fingerprint": info.row.fingerprint,
        "online": info.online if aggregator.alive else None,
        "presence": aggregator.presence(info, "unknown"),
        "seen_at": info.seen_at,
        "last_seen_at": aggregator.last_seen_at(info),
        "has": dataclasses.asdict(info.has),
        "tasks": list(info.tasks),
        "tags": info.tags,
        "updates": info.updates,
        "payload_up": info.payload_up,
        "last_outcome": info.last_outcome,
    }


def print_device(info: DeviceInfo, links: Sequence[MeasureRow], aggregator: AggregatorState, json: bool) -> None:
    """Print one device with the measurements of its link; capabilities that it did not report are shown as unknown."""
    if json:
        measured = {row.kind: {"p50": row.p50, "p90": row.p90, "samples": len(row.samples)} for row in links}
        console.document(
            device_document(info, aggregator) | {"versions": info.hello.get("versions", {}), "measured": measured}
        )
        return
    has, unknown = info.has, "unknown"
    power = {None: unknown, True: "mains", False: "battery"}[has.mains]
    link = {None: unknown, True: "metered", False: "unmetered"}[has.metered]
    memory = [unknown if count is None else f"{count / GIB:.1f} GiB" for count in (has.free_bytes, has.memory_bytes)]
    rows = {
        "state": f"{info.row.standing(aggregator.tls)} ({info.row.how})",
        "fingerprint": formatting.grouped(info.row.fingerprint),
        "presence": aggregator.presence(info, unknown),
        "connected": console.ago(info.seen_at), "last seen": aggregator.last_seen(info),
        "cores": unknown if has.cores is None else str(has.cores), "memory free": " of ".join(dict.fromkeys(memory)),
        "power": power, "link": link, **_measured(links),
        "runs": ", ".join(f"{name} {version}" for name, version in info.hello.get("versions", {}).items()),
        "tasks": _tasks(info), "tags": " ".join(info.tags),
        "updates": f"{info.updates}, {formatting.size(info.payload_up)}",
        "last outcome": info.last_outcome,
    }  # fmt: skip
    console.line(info.row.name)
    for name, value in rows.items():
        console.sentence(value or formatting.NOTHING, begin=f"  {name:<12} ")


def _measured(links: Sequence[MeasureRow]) -> dict[str, str]:
    """Return the link's figures by name: the median, and the bound that nine of ten measurements kept."""
    rows, of = {}, {row.kind: row for row in links}
    for kind, name, word, most in (("rtt", "round trip", duration, "at most"), ("up", "upload", speed, "at least"),
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


def print_audit_log(actions: Sequence[DeviceAction], notes: Sequence[RefusalNote], json: bool) -> None:
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


def invitation_rows(address: InviteAddress, made: Sequence[Invited]) -> list[dict[str, Any]]:
    """Return new invitations by the names of `core.invitation.COLUMNS`."""
    return [address.row(one.id, one.name, one.secret, one.expires_at) for one in made]


def print_new_invitations(address: InviteAddress, made: Sequence[Invited], by_hand: bool, json: bool) -> None:
    """Print new invitations with the command to paste; their secrets are shown only this once."""
    rows = invitation_rows(address, made)
    if json:
        urls = list(address.urls)
        console.document(
            [{**row, "urls": urls, "expires_at": one.expires_at} for row, one in zip(rows, made, strict=True)]
        )
        return
    for one, row in zip(made, rows, strict=True):
        console.line(
            f"invitation {one.id} for {one.name or 'any name'}, good once, until {console.moment(one.expires_at)}"
        )
        console.line(f"  {row['invitation']}")
        console.line("  on the device, which reads the invitation from standard input (paste it, then Enter):")
        console.line(f"    {row['command']}")
    if len(address.urls) > 1:
        console.note(f"the device API is also at {', '.join(address.urls[1:])}")
    _note_approval(by_hand)


def _note_approval(by_hand: bool) -> None:
    """Note the approval that a device of these invitations needs."""
    if by_hand:
        console.note("the device waits for thinwire devices approve NAME; compare the fingerprint that both ends print")


def print_invitation_file(path: Path, made: Sequence[Invited], by_hand: bool, json: bool) -> None:
    """Print that the invitations were written to a file."""
    if json:
        console.document({"file": str(path), "ids": [one.id for one in made], "expires_at": made[0].expires_at})
    else:
        many = f"{len(made)} invitations, each" if len(made) > 1 else "1 invitation,"
        console.line(f"{path}: {many} good once, until {console.moment(made[0].expires_at)}")
        console.note("whoever reads that file can join: hand the lines out and delete it")
        _note_approval(by_hand)


def print_invitations(rows: Sequence[InvitationRow], withdrawn: int | None, json: bool) -> None:
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


def _row(info: DeviceInfo, aggregator: AggregatorState) -> tuple[str, ...]:
    """Return the cells of a device in the list."""
    tasks = _tasks(info)
    state, presence = info.row.standing(aggregator.tls), aggregator.presence(info, "")
    return (
        info.row.name, state, info.row.how, info.row.fingerprint[:SHORT], presence, aggregator.last_seen(info),
        info.has.sentence, tasks, str(info.updates), formatting.size(info.payload_up), info.last_outcome,
    )  # fmt: skip


def _tasks(info: DeviceInfo) -> str:
    """Return the names of a device's tasks, with broken ones marked."""
    return ", ".join(task["name"] + (" (broken)" if task.get("error") else "") for task in info.tasks)
