"""From the store's rows to the answers of the API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from thinwire.core.errors import NotFound
from thinwire.core.layout import Layout
from thinwire.store import RoundRow, RunRow, Store, UpdateRow
from thinwire.store.why import Why, why
from thinwire.web import models
from thinwire.web.sentences import closing, run_sentence
from thinwire.web.timeline import stretches
from thinwire.web.working import client_states

Shown = TypeVar("Shown", bound=models.Run)

LATEST_ROUNDS = 3  # in which a device's examples are looked for
EARLIER_ROUNDS = 20  # in which the asks of late answers are looked for
KEPT_RUNS = 8


class Reader:
    """All reads of the page. A run's rounds are kept until the journal has news of it: tabs ask for them often."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, tuple[int, list[RoundRow]]] = {}

    def runs(self) -> list[models.Run]:
        """Newest first; one that goes on says how far its round is."""
        return [_run(models.Run, row, self._open_round(row)) for row in self._store.runs()]

    def run(self, name: str) -> models.RunPage:
        store = self._store
        seq, row = store.last_seq(), store.run(name)
        rounds = self.kept_rounds(row.run_id)
        latest = [store.updates(row.run_id, found.round) for found in rounds[: -LATEST_ROUNDS - 1 : -1]]
        newest = rounds[-1] if rounds else None
        clients = client_states(row, newest, latest, store.clients(row.run_id), store.devices())
        return _run(
            models.RunPage, row, newest if newest and not newest.reason else None,
            plan=row.plan, model_digest=row.model_digest, layout_digest=Layout.from_json(row.layout).digest,
            task_version=row.task_report.version, seconds=sum(found.seconds or 0.0 for found in rounds),
            clients=clients, seq=seq, now=time.time(),
        )  # fmt: skip

    def rounds(self, name: str, first: int = 1) -> list[models.Round]:
        """The run's rounds from `first` on, with sums since the run's begin."""
        return _with_sums(self.kept_rounds(self._store.run(name).run_id), first)

    def round(self, name: str, number: int) -> models.RoundPage:
        row = self._store.run(name)
        rounds = self.kept_rounds(row.run_id)
        found = next((candidate for candidate in rounds if candidate.round == number), None)
        if found is None:
            raise NotFound(f"{row.run_id} has no round {number}", why=f"it has opened {len(rounds)}")
        own = self._store.updates(row.run_id, number)
        late = self._late(row.run_id, found, own)
        took = why(found, own, row.size) if found.reason else Why(number, 0.0, "")
        shown = _with_sums(rounds[: rounds.index(found) + 1], number)[0].model_copy(update={"why": took.sentence})
        return models.RoundPage(
            **dict(shown), now=time.time(), stages=dict(took.stages), waited_for=list(took.waited_for),
            updates=[update(one, found.opened_at) for one in own],
            late_folded=[update(one, found.opened_at) for one in late],
        )  # fmt: skip

    def updates(self, name: str, number: int | None) -> list[models.Update]:
        """Every ask of the run, or of one round."""
        run_id = self._store.run(name).run_id
        opened = {found.round: found.opened_at for found in self.kept_rounds(run_id)}
        asked = self._store.updates(run_id, number)
        return [update(one, opened.get(one.round, one.asked_at or 0.0)) for one in asked]

    def kept_rounds(self, run_id: str) -> list[RoundRow]:
        seq = self._store.last_seq(run_id)
        kept = self._kept.get(run_id, (-1, []))
        if kept[0] != seq:
            kept = self._kept[run_id] = (seq, self._store.rounds(run_id))
            for oldest in list(self._kept)[:-KEPT_RUNS]:
                self._kept.pop(oldest, None)
        return kept[1]

    def _open_round(self, row: RunRow) -> RoundRow | None:
        newest = self.kept_rounds(row.run_id)[-1:] if row.status == "running" else []
        return newest[0] if newest and not newest[0].reason else None

    def _late(self, run_id: str, found: RoundRow, own: Sequence[UpdateRow]) -> list[UpdateRow]:
        """Answers to earlier rounds' asks that were folded into this one."""
        missing = set(found.folded) - {one.update_id for one in own}
        late = list[UpdateRow]()
        for number in range(found.round - 1, max(0, found.round - EARLIER_ROUNDS), -1):
            if not missing:
                break
            late += [one for one in self._store.updates(run_id, number) if one.update_id in missing]
            missing -= {one.update_id for one in late}
        return late


def update(row: UpdateRow, opened_at: float) -> models.Update:
    shown = models.Update.model_validate(row)
    drawn = [models.Stretch.model_validate(stretch) for stretch in stretches(row, opened_at)]
    return shown.model_copy(update={"stretches": drawn})


def _run(kind: type[Shown], row: RunRow, open_round: RoundRow | None, **more: Any) -> Shown:
    values = {name: getattr(row, name) for name in models.Run.model_fields if name != "sentence"}
    return kind(**values, sentence=run_sentence(row, open_round), **more)


def _with_sums(rows: Sequence[RoundRow], first: int) -> list[models.Round]:
    """The rounds from `first` on; the sums are over all before them too."""
    shown, until_s, payload, wire = list[models.Round](), 0.0, 0, None
    for row in rows:
        until_s += row.seconds or 0.0
        payload += row.payload_up + row.payload_down
        if row.wire_up is not None or row.wire_down is not None:
            wire = (wire or 0) + (row.wire_up or 0) + (row.wire_down or 0)
        if row.round >= first:
            sums = {"until_s": until_s, "until_payload": payload, "until_wire": wire}
            said = {"closing": closing(row), "why": why(row).sentence if row.reason else ""}
            shown.append(models.Round.model_validate(row).model_copy(update={**sums, **said}))
    return shown
