"""From the store's rows to the answers of the API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from thinwire.core.errors import NotFound
from thinwire.core.layout import Layout
from thinwire.store import DeviceInfo, RoundRow, RunRow, Store, UpdateRow
from thinwire.web import models
from thinwire.web.sentences import closing, run_sentence, why
from thinwire.web.timeline import stretches
from thinwire.web.working import client_states

Shown = TypeVar("Shown", bound=models.Run)

LATEST_ROUNDS = 3  # in which a device's examples are looked for
EARLIER_ROUNDS = 20  # in which the asks of late answers are looked for


def runs(store: Store) -> list[models.Run]:
    """Newest first; one that goes on says how far its round is."""
    return [_run(models.Run, row, _open_round(store, row)) for row in store.runs()]


def run_page(store: Store, name: str) -> models.RunPage:
    seq, row = store.last_seq(), store.run(name)
    rounds = store.rounds(row.run_id)
    latest = [store.updates(row.run_id, found.round) for found in rounds[: -LATEST_ROUNDS - 1 : -1]]
    newest = rounds[-1] if rounds else None
    return _run(
        models.RunPage, row, newest if newest and not newest.reason else None,
        plan=row.plan, model_digest=row.model_digest, layout_digest=Layout.from_json(row.layout).digest,
        task_version=row.task_report.version, seconds=sum(found.seconds or 0.0 for found in rounds),
        clients=client_states(row, newest, latest, store.clients(row.run_id), store.devices()),
        seq=seq, now=time.time(),
    )  # fmt: skip


def rounds(store: Store, name: str, first: int = 1) -> list[models.Round]:
    """The run's rounds from `first` on, with sums since the run's begin."""
    row = store.run(name)
    return [found for found in _with_sums(store.rounds(row.run_id)) if found.round >= first]


def round_page(store: Store, name: str, number: int) -> models.RoundPage:
    row = store.run(name)
    all_rounds = store.rounds(row.run_id)
    found = next((candidate for candidate in all_rounds if candidate.round == number), None)
    if found is None:
        raise NotFound(f"{row.run_id} has no round {number}", why=f"it has opened {len(all_rounds)}")
    updates = store.updates(row.run_id, number)
    shown = next(s for s in _with_sums(all_rounds) if s.round == number)
    return models.RoundPage(
        **dict(shown), updates=[update(one, found.opened_at) for one in updates],
        late_folded=[update(one, found.opened_at) for one in _late(store, row, found, updates)], now=time.time(),
    )  # fmt: skip


def updates(store: Store, name: str, number: int | None) -> list[models.Update]:
    """Every ask of the run, or of one round."""
    row = store.run(name)
    opened = {found.round: found.opened_at for found in store.rounds(row.run_id)}
    return [update(one, opened.get(one.round, one.asked_at or 0.0)) for one in store.updates(row.run_id, number)]


def update(row: UpdateRow, opened_at: float) -> models.Update:
    shown = models.Update.model_validate(row)
    return shown.model_copy(update={"stretches": [models.Stretch.model_validate(s) for s in stretches(row, opened_at)]})


def devices(store: Store) -> list[models.Device]:
    return [_device(info) for info in store.devices()]


def _device(info: DeviceInfo) -> models.Device:
    tasks = [models.Task(name=t["name"], version=t.get("version", ""), error=t.get("error", "")) for t in info.tasks]
    return models.Device(
        device=info.row.name, state=info.row.state, how=info.row.how, online=info.online, seen_at=info.seen_at,
        tasks=tasks, versions={str(k): str(v) for k, v in dict(info.hello.get("versions", {})).items()},
        updates=info.updates, payload_up=info.payload_up, last_outcome=info.last_outcome,
    )  # fmt: skip


def _run(kind: type[Shown], row: RunRow, open_round: RoundRow | None, **more: Any) -> Shown:
    values = {name: getattr(row, name) for name in models.Run.model_fields if name != "sentence"}
    return kind(**values, sentence=run_sentence(row, open_round), **more)


def _open_round(store: Store, row: RunRow) -> RoundRow | None:
    newest = store.rounds(row.run_id)[-1:] if row.status == "running" else []
    return newest[0] if newest and not newest[0].reason else None


def _with_sums(rows: Sequence[RoundRow]) -> list[models.Round]:
    shown, until_s, payload, wire = list[models.Round](), 0.0, 0, None
    for row in rows:
        until_s += row.seconds or 0.0
        payload += row.payload_up + row.payload_down
        if row.wire_up is not None or row.wire_down is not None:
            wire = (wire or 0) + (row.wire_up or 0) + (row.wire_down or 0)
        sums = {"until_s": until_s, "until_payload": payload, "until_wire": wire}
        said = {"closing": closing(row), "why": why(row)}
        shown.append(models.Round.model_validate(row).model_copy(update={**sums, **said}))
    return shown


def _late(store: Store, run: RunRow, found: RoundRow, own: Sequence[UpdateRow]) -> list[UpdateRow]:
    """Answers to earlier rounds' asks that were folded into this one."""
    missing = set(found.folded) - {one.update_id for one in own}
    late = list[UpdateRow]()
    for number in range(found.round - 1, max(0, found.round - EARLIER_ROUNDS), -1):
        if not missing:
            break
        late += [one for one in store.updates(run.run_id, number) if one.update_id in missing]
        missing -= {one.update_id for one in late}
    return late
