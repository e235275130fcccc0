"""Reads of the store for the API about devices, invitations and refusals, and the sentences that describe them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.clock import down_since_of
from thinwire.core.errors import NotFound
from thinwire.core.events import ENDED, DeviceOffline
from thinwire.core.formatting import duration
from thinwire.core.link_state import SUSPECT_S
from thinwire.reports.privacy import last_contacts
from thinwire.reports.reason_text import OUTCOME_TEXTS
from thinwire.reports.secure_rounds import why_not_known
from thinwire.store import (
    LINK_KINDS,
    DeviceAction,
    DeviceInfo,
    InvitationRow,
    RefusalNote,
    RunRow,
    Store,
    by_todays_name,
)
from thinwire.store.audit import WAS
from thinwire.web import device_schemas as models
from thinwire.web.device_health import MAX_READ, ROWS, Change, Presence, Span, rows_of, upload_rate
from thinwire.web.settings import aggregator

ACTIONS = 1000  # latest entries of the audit log, in which the deciding ones are searched
LAST_ASSIGNMENTS = 50
NOTES = 200
OLD_INVITATIONS = 300


@dataclass(frozen=True)
class SharedReads:
    """Data that is read once for all devices of a list."""

    tls: bool
    links: Mapping[str, Mapping[str, models.Measured]]  # by device, then by kind of measurement
    left: Mapping[str, DeviceOffline]
    runs: Mapping[str, RunRow]  # the latest run on devices, by task
    decisions: Mapping[str, DeviceAction]  # the latest decision, by device
    invitations: Mapping[str, int]  # by the device that joined with it
    heard: Mapping[str, float]  # last contact of each online device, wall clock (`last_contacts`)
    gone: bool  # the aggregator: nobody knows who is online


class Devices:
    """Reads the store for the pages of devices."""

    def __init__(self, store: Store, lock: Path | None) -> None:
        self._store, self._lock = store, lock
        self._presence = Presence(store)

    def page(self, first: int = 0, count: int | None = None) -> list[models.Device]:
        """Return `count` devices from the place `first` on, by name; without `count` all."""
        shared = self._shared_reads(self._store.audit.actions(limit=ACTIONS))
        end = None if count is None else first + count
        return [models.Device(**_device(info, shared)) for info in self._store.devices()[first:end]]

    def one(self, name: str) -> models.DevicePage:
        """Return one device with its log and its last assignments; `NotFound` if no device has the name."""
        seq = self._store.changes()
        info = next((one for one in self._store.devices() if one.row.name == name), None)
        if info is None:
            raise _nobody(name)
        actions, selected = self._store.audit.actions(name), self._store.device_updates(name, LAST_ASSIGNMENTS)
        rounds = self.stays(name)
        runs = {run_id: self._store.run(run_id) for run_id in {u.run_id for u in selected}}
        hidden = {run_id: why_not_known(run) for run_id, run in runs.items()}
        going = (u for u in selected if u.outcome == "failed" and runs[u.run_id].status not in ENDED)
        declined = next((u for u in going if u.reason.startswith("declined")), None)
        return models.DevicePage(
            **_device(info, self._shared_reads(actions)),
            actions=[models.Action(at=a.at, who=a.who, what=a.what, sentence=action(a)) for a in actions],
            assignments=[
                models.DeviceAssignment.model_validate(u).model_copy(
                    update={"up_bytes_s": upload_rate(u), "not_known": hidden[u.run_id]}
                )
                for u in selected
            ],
            stays=rounds, stays_text=stays({one.run_id: one.rounds for one in rounds}),
            declined=models.Declined(
                run_id=declined.run_id, round=declined.round, rule=declined.reason.partition(": ")[2],
                at=declined.assigned_at,
            ) if declined else None,
            policy=str(dict(info.hello.get("versions", {})).get("policy", "")), seq=seq, now=time.time(),
        )  # fmt: skip

    def health(self, name: str, span: Span, until: float | None) -> models.Health:
        """Return what was measured of a device in the rows of a span, which end at `until`, or now."""
        info = next(iter(self._store.devices([name])), None)
        if info is None:
            raise _nobody(name)
        number, length = ROWS[span]
        now = time.time()
        until = min(now, until) if until is not None else now
        since = until // length * length - (number - 1) * length
        updates = self._store.device_updates(name, MAX_READ + 1, since, until)
        read_since = updates[MAX_READ - 1].assigned_at if len(updates) > MAX_READ else None
        hidden = {why_not_known(self._store.run(run_id)) for run_id in {one.run_id for one in updates}} - {""}
        changes = self._changes(info)
        return models.Health(
            device=name, span=span, read_since=read_since, not_known="; ".join(sorted(hidden)),
            rows=rows_of(span, until, changes, updates[:MAX_READ], read_since or 0.0),
        )  # fmt: skip

    def _changes(self, info: DeviceInfo) -> list[Change]:
        """Return when a device was online, also under its earlier names; the aggregator's end is the end of that."""
        name = info.row.name
        found = self._presence.changes(name)
        for one in self._store.audit.actions(name):
            if one.what == "rename":
                before = self._presence.changes(one.detail.removeprefix(WAS))
                found = [was for was in before if was[0] < one.at] + [now for now in found if now[0] >= one.at]
        if info.online and info.seen_at and not found:
            found = [(info.seen_at, True)]
        if self._lock and aggregator(self._lock)[0] == "gone" and (down_since := down_since_of(self._lock)):
            found = [*found, (max(down_since, found[-1][0]), False)] if found else []
        return found

    def stays(self, name: str) -> list[models.Stays]:
        """Return the rounds whose models contain updates of the device."""
        return [models.Stays(run_id=run, rounds=rounds) for run, rounds in self._store.aggregated_rounds(name)]

    def invitations(self) -> list[models.ListedInvitation]:
        """Return the open invitations, then the latest `OLD_INVITATIONS` of the others, both newest first."""
        now, rows = time.time(), self._store.invitations.all()[::-1]
        open_ones, others = [r for r in rows if r.state == "open"], [r for r in rows if r.state != "open"]
        shown = [*open_ones, *others[:OLD_INVITATIONS]]
        return [models.ListedInvitation.model_validate({**vars(row), "sentence": invited(row, now)}) for row in shown]

    def refusals(self) -> list[models.RefusedRequest]:
        """Return the refusals of the device API, newest first."""
        notes = self._store.audit.notes(NOTES)
        return [models.RefusedRequest(**vars(note), told=told(note)) for note in notes]

    def _shared_reads(self, actions: Sequence[DeviceAction]) -> SharedReads:
        """Read the data that all devices of a list share."""
        deciding = [(name, one) for name, one in by_todays_name(actions) if name and one.what in DECIDING]
        runs = self._store.runs(with_deleted=True)
        on_devices = [run for run in runs if run.source == "devices" and run.deleted_at is None]
        state, about = aggregator(self._lock)
        return SharedReads(
            bool(about.get("pin")), _links(self._store), self._presence.departures(),
            {run.task: run for run in reversed(on_devices)}, dict(reversed(deciding)),
            {row.used_by: row.id for row in self._store.invitations.all() if row.used_by},
            last_contacts(runs, self._lock), state == "gone",
        )  # fmt: skip


def _nobody(name: str) -> NotFound:
    return NotFound(
        f"no device {name}", why="no device of this name has joined, or it was renamed", hint="thinwire devices list"
    )


def _device(info: DeviceInfo, shared: SharedReads) -> dict[str, Any]:
    """Return the fields of `models.Device`."""
    row, left, seen = info.row, shared.left.get(info.row.name), shared.links.get(info.row.name, {})
    device_standing, decision = row.standing(shared.tls), shared.decisions.get(row.name)
    gone = left if left and not info.online and left.at >= (info.seen_at or 0.0) else None
    link = dict(info.hello.get("link", {}))
    tasks = [_task(said, shared.runs) for said in info.tasks]
    heard = max(info.last_seen_at or 0.0, shared.heard.get(row.name, 0.0) if info.online else 0.0) or None
    sentence = {
        "pending": lambda: waits(row.state, row.how, shared.invitations.get(row.name)),
        "approved": lambda: admitted(row.how, decision),
        "revoked": lambda: out(decision),
    }[device_standing]()
    return {
        "device": row.name, "standing": device_standing, "sentence": sentence, "state": row.state, "how": row.how,
        "came": CAME.get(row.how, row.how), "fingerprint": row.fingerprint, "created_at": row.created_at,
        "online": info.online, "seen_at": info.seen_at,
        "last_seen_at": heard, "suspect_at": heard + SUSPECT_S if heard and info.online else None,
        "disconnected_at": gone.at if gone else None, "disconnect_reason": gone.why if gone else "",
        "tasks": tasks,
        "versions": {str(k): str(v) for k, v in dict(info.hello.get("versions", {})).items() if k != "policy"},
        "link": models.Link(**seen, rtt_s=link.get("rtt_s"), skew_s=link.get("skew_s")),
        "has": models.Has.model_validate(info.has),
        "tags": info.tags, "updates": info.updates, "payload_up": info.payload_up, "last_outcome": info.last_outcome,
        "last_run": info.last_run, "last_is_over": info.last_is_over,
        "next_step": next_step(info, device_standing, tasks, shared.gone),
    }  # fmt: skip


def _links(store: Store) -> dict[str, dict[str, models.Measured]]:
    """Return the measurements of all links, by device and kind."""
    found = dict[str, dict[str, models.Measured]]()
    for one in store.measures(*LINK_KINDS):
        seen = models.Measured(p50=one.p50, p90=one.p90, samples=len(one.samples), least=one.least)
        found.setdefault(one.device, {})[one.kind] = seen
    return found


def _task(said: Mapping[str, Any], runs: Mapping[str, RunRow]) -> models.Task:
    """Return a task of a device compared with the latest run; a digest that either side lacks is not compared."""
    task = models.Task(**{name: said[name] for name in models.Task.model_fields if name in said})
    if (run := runs.get(task.name)) is None:
        return task
    pairs = [("code", task.source_digest, run.task_report.source_digest)]
    pairs.append(("model", task.layout_digest, run.task_report.layout_digest))
    task.differs = tuple(differs(what, run.run_id) for what, own, run_s in pairs if own and run_s and own != run_s)
    return task


CAME = {
    "loopback": "over this machine's own address",
    "invitation": "with an invitation",
    "manual": "approved by a person",
    "stock": "as a stock Flower node, by its public key",
}
DOES = {
    "enrol": "came", "join": "joined", "add": "was added by its public key", "approve": "was approved",
    "revoke": "was revoked", "leave": "left, and revoked its own access",
    "tag": "got other tags", "carry": "joined again with a new key, and is charged for the privacy spending of",
}  # fmt: skip
DECIDING = ("enrol", "join", "add", "approve", "revoke", "leave")


def waits(state: str, how: str, invitation: int | None) -> str:
    """Return the reason why a device is pending."""
    if state == "approved":
        return (
            "It came over this machine's own address, which approves no device now that the device API is "
            "open to other machines."
        )
    if how == "invitation":
        which = f"invitation {invitation}" if invitation else "an invitation"
        return f"It joined with {which}, which needs approval by hand."
    return "Its key is known here, and nobody has approved it yet."


def admitted(how: str, last: DeviceAction | None) -> str:
    """Return the reason why a device is approved."""
    if last is not None and last.what in ("approve", "add"):
        return f"Approved by {last.who}."
    return {
        "loopback": "Approved at once: it came over this machine's own address.",
        "invitation": "Approved by the invitation that it joined with.",
    }.get(how, "Approved.")


def out(last: DeviceAction | None) -> str:
    """Return the sentence that says who revoked a device."""
    if last is None:
        return "Revoked."
    return "It left by itself." if last.what == "leave" else f"Revoked by {last.who}."


SKEWED_S = 60.0  # from here on a person should set the device's clock


def next_step(info: DeviceInfo, standing: str, tasks: Sequence[models.Task], gone: bool) -> str:
    """Return the one thing to do about a device now, the most urgent first; "" if there is none.

    A failure in a run that is over needs nothing. `gone`: no aggregator is running, and nobody knows who is online.
    """
    if standing != "approved":
        return "Compare its fingerprint with the one that it printed, then approve it." if standing == "pending" else ""
    own_name = info.hello.get("name", info.row.name)  # a renamed device keeps its own
    doctor = f"thinwire client doctor --name {own_name}"
    for task in tasks:
        if task.error:
            return f"Fix its task {task.name}: {doctor} on the device shows what is wrong."
    if not info.online and not gone:
        again = "again " if info.seen_at else ""
        return f"Start its client {again}on the device; if it does not stay online, {doctor} there shows why."
    for task in tasks:
        if task.differs:
            return f"Install the code of {task.name} that the latest run has, then start its client again."
    skew_s = dict(info.hello.get("link", {})).get("skew_s")
    if skew_s is not None and abs(skew_s) >= SKEWED_S:
        return f"Set its clock: it is {duration(abs(skew_s))} {'behind' if skew_s > 0 else 'ahead'}."
    if info.last_outcome.startswith(("failed", "dropped")) and not info.last_is_over:
        outcome, _, reason = info.last_outcome.partition(": ")
        became = "was dropped" if outcome == "dropped" else outcome
        return f"Read why its last assignment in {info.last_run} {became}: {OUTCOME_TEXTS.get(reason, reason)}."
    return ""


def action(said: DeviceAction) -> str:
    """Return an entry of the audit log in words: `joined: invitation 3, from 192.0.2.7:40000, pending`."""
    if said.what == "rename":
        return f"was renamed: it {said.detail}"
    words = DOES.get(said.what, said.what)
    return f"{words}: {said.detail}" if said.detail else words


def invited(row: InvitationRow, now: float) -> str:
    """Return the state of an invitation in words; `now` is wall-clock time."""
    match row.state:
        case "open":
            by_hand = "; who comes waits for approval" if row.approve_manually else ""
            return f"open for {_left(row.expires_at - now)} more{by_hand}"
        case "used":
            return f"used by {row.used_by}"
        case "withdrawn":
            return "withdrawn before anybody used it"
        case "expired":
            return "expired unused"


def _left(count: float) -> str:
    """Format a remaining time given in seconds."""
    return duration(max(0.0, count)) if count < 48 * 3600 else f"{count / 86400:.0f} days"


def told(note: RefusalNote) -> str:
    """Return what the refused client received: about an invitation only that it is not usable."""
    return "no invitation that can be used" if note.kind == "join" else note.why


def differs(what: str, run_id: str) -> str:
    """Return the sentence on a task that differs from a run's in its code or its model."""
    return f"its {what} is not that of {run_id}"


def stays(rounds: Mapping[str, Sequence[int]]) -> str:
    """Return the runs and rounds whose models contain updates of a device.

    >>> stays({"digits-1": [1, 2, 3, 5], "ecg-2": [4]}), stays({})
    ('digits-1 rounds 1–3, 5; ecg-2 round 4', 'no model that is shown here')
    """
    said = []
    for run_id, numbers in rounds.items():
        spans: list[list[int]] = []
        for number in numbers:
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        shown = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
        said.append(f"{run_id} {'round' if len(numbers) == 1 else 'rounds'} {shown}")
    return "; ".join(said) or "no model that is shown here"


def approved(name: str, aggregator: str) -> str:
    """Return the sentence on a device that was just approved."""
    when = "when an aggregator is running again" if aggregator == "gone" else "at its next call"
    return f"{name} is approved: it has access {when}."


def revoke_access(name: str, aggregator: str, confirmed: bool | None) -> str:
    """Return how far a revocation has come: the row counts at once, and the aggregator then clears what is open."""
    if confirmed:
        return (
            f"{name} is revoked, and what was open is cleared: its calls, uploads, assignments and answers "
            "not yet aggregated."
        )
    if confirmed is False:
        return f"{name} was approved again before the aggregator had carried that out."
    if aggregator == "gone":
        return f"{name} is revoked. No aggregator is running: the next one applies it before its device API opens."
    return f"{name} is revoked: the device API refuses it within a second. The aggregator is clearing what was open."


def withdrawn(number: int) -> str:
    """Return the sentence on an invitation that was just withdrawn."""
    return f"Invitation {number} is withdrawn: nobody can join with it."
