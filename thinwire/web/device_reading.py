"""From the store's rows to what the API says of devices, invitations and the door."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from thinwire.core.errors import NotFound
from thinwire.core.heartbeat import heard_by
from thinwire.store import DeviceAction, DeviceInfo, RunRow, Store, by_todays_name
from thinwire.web import device_models as models
from thinwire.web import device_sentences as say
from thinwire.web.departures import Departure, Departures
from thinwire.web.service import aggregator
from thinwire.web.upload_rate import upload_rate

ACTIONS = 1000  # among which who shut a device out is looked for
LAST_ASKS = 50
NOTES = 200
OLD_INVITATIONS = 300
LINK = ("down", "up", "rtt")  # kinds of measures


@dataclass(frozen=True)
class Beside:
    """What is read once for all devices of a list."""

    tls: bool
    links: Mapping[str, Mapping[str, models.Measured]]  # by device, then by kind
    left: Mapping[str, Departure]
    runs: Mapping[str, RunRow]  # the newest on devices, by task
    deeds: Mapping[str, DeviceAction]  # the newest that decided about a device
    invitations: Mapping[str, int]  # by the device that came with it
    heard: Mapping[str, float]  # when each that is there was heard last


class Devices:
    """All reads of the page of devices."""

    def __init__(self, store: Store, lock: Path | None) -> None:
        self._store, self._lock = store, lock
        self._departures = Departures(store)

    def all(self) -> list[models.Device]:
        beside = self._beside(self._store.device_actions(limit=ACTIONS))
        return [models.Device(**_device(info, beside)) for info in self._store.devices()]

    def one(self, name: str) -> models.DevicePage:
        """`NotFound` when nobody of that name has come."""
        seq = self._store.last_seq()
        info = next((one for one in self._store.devices() if one.row.name == name), None)
        if info is None:
            raise NotFound(f"no device {name}", why="nobody of that name has come, or it was renamed")
        actions, asked = self._store.device_actions(name), self._store.device_updates(name, LAST_ASKS)
        declined = next((u for u in asked if u.outcome == "failed" and u.reason.startswith("declined")), None)
        rounds = self.stays(name)
        return models.DevicePage(
            **_device(info, self._beside(actions)),
            actions=[models.Action(at=a.at, who=a.who, what=a.what, sentence=say.action(a)) for a in actions],
            asked=[
                models.Asked.model_validate({**_named(models.Asked, u), "up_bytes_s": upload_rate(u)}) for u in asked
            ],
            stays=rounds, stays_text=say.stays({one.run_id: one.rounds for one in rounds}),
            declined=models.Declined(
                run_id=declined.run_id, round=declined.round, rule=declined.reason.partition(": ")[2],
                at=declined.asked_at,
            ) if declined else None,
            policy=str(dict(info.hello.get("versions", {})).get("policy", "")), seq=seq, now=time.time(),
        )  # fmt: skip

    def stays(self, name: str) -> list[models.Stays]:
        return [models.Stays(run_id=run, rounds=rounds) for run, rounds in self._store.folded_rounds(name)]

    def invitations(self) -> list[models.Invitation]:
        """Newest first, those that can be used before all others, of which the oldest are left out."""
        now, rows = time.time(), self._store.invitations.all()[::-1]
        open_ones, others = [r for r in rows if r.state == "open"], [r for r in rows if r.state != "open"]
        shown = [*open_ones, *others[:OLD_INVITATIONS]]
        return [models.Invitation.model_validate({**vars(row), "sentence": say.invited(row, now)}) for row in shown]

    def refusals(self) -> list[models.DoorRefusal]:
        """Newest first."""
        notes = self._store.door_notes(NOTES)
        return [models.DoorRefusal(**vars(note), told=say.told(note)) for note in notes]

    def _beside(self, actions: Sequence[DeviceAction]) -> Beside:
        deciding = [(name, one) for name, one in by_todays_name(actions) if name and one.what in say.DECIDING]
        on_devices = [run for run in self._store.runs() if run.source == "devices"]
        return Beside(
            bool(aggregator(self._lock)[1].get("pin")), _links(self._store), self._departures.of_all(),
            {run.task: run for run in reversed(on_devices)}, dict(reversed(deciding)),
            {row.used_by: row.id for row in self._store.invitations.all() if row.used_by},
            heard_by(self._lock) if self._lock else {},
        )  # fmt: skip


def _device(info: DeviceInfo, beside: Beside) -> dict[str, Any]:
    row, left, seen = info.row, beside.left.get(info.row.name), beside.links.get(info.row.name, {})
    standing, deed = say.standing(row.state, row.how, beside.tls), beside.deeds.get(row.name)
    gone = left if left and not info.online and left.at >= (info.seen_at or 0.0) else None
    link = dict(info.hello.get("link", {}))
    sentence = {
        "pending": lambda: say.waits(row.state, row.how, beside.invitations.get(row.name)),
        "approved": lambda: say.let_in(row.how, deed),
        "revoked": lambda: say.out(deed),
    }[standing]()
    return {
        "device": row.name, "standing": standing, "sentence": sentence, "state": row.state, "how": row.how,
        "came": say.CAME.get(row.how, row.how), "fingerprint": row.fingerprint, "created_at": row.created_at,
        "online": info.online, "seen_at": info.seen_at,
        "heard_at": max(info.heard_at or 0.0, beside.heard.get(row.name, 0.0) if info.online else 0.0) or None,
        "left_at": gone.at if gone else None, "left_why": gone.why if gone else "",
        "tasks": [_task(said, beside.runs) for said in info.tasks],
        "versions": {str(k): str(v) for k, v in dict(info.hello.get("versions", {})).items() if k != "policy"},
        "link": models.Link(**seen, rtt_s=link.get("rtt_s"), skew_s=link.get("skew_s")),
        "has": models.Has.model_validate(info.has),
        "updates": info.updates, "payload_up": info.payload_up, "last_outcome": info.last_outcome,
    }  # fmt: skip


def _links(store: Store) -> dict[str, dict[str, models.Measured]]:
    found = dict[str, dict[str, models.Measured]]()
    for one in store.measures(*LINK):
        seen = models.Measured(p50=one.p50, p90=one.p90, samples=len(one.samples), least=one.least)
        found.setdefault(one.device, {})[one.kind] = seen
    return found


def _task(said: Mapping[str, Any], runs: Mapping[str, RunRow]) -> models.Task:
    """A digest that either side does not know is not compared."""
    task = models.Task(**{name: said[name] for name in models.Task.model_fields if name in said})
    if (run := runs.get(task.name)) is None:
        return task
    pairs = [("code", task.source_digest, run.task_report.source_digest)]
    pairs.append(("model", task.layout_digest, run.task_report.layout_digest))
    task.differs = tuple(say.differs(what, run.run_id) for what, own, run_s in pairs if own and run_s and own != run_s)
    return task


def _named(kind: type[BaseModel], row: object) -> dict[str, Any]:
    return {name: getattr(row, name) for name in kind.model_fields if hasattr(row, name)}
