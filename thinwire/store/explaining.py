"""The explanations of closed rounds, and the sums until each of them: computed from the tables and stored in them.

The projection calls `Explainer` in the transaction that closes a round. So a reader finds both in the round's row, and
no read depends on the number of rounds before it.

Invariant: the stored explanation equals the one of `why` on the rows as they are. A reply that comes late, or the end
of its wait, changes it only if the round had waited for its device, or has phases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, literal, select, update

from thinwire.store.queries import columns_of, phase_rows
from thinwire.store.read_models import PhaseRow, RoundRow, UpdateRow
from thinwire.store.round_explanation import RoundExplanation, stored, why
from thinwire.store.round_timing import turn_at
from thinwire.store.run_totals import RunTotals
from thinwire.store.tables import Client, Measure, Round, RoundPhase, Run, Update

MANY: Final = 500  # values in one query
UNTIL: Final[Mapping[str, tuple[str, ...]]] = {  # a sum from the run's start -> the columns of each round
    "until_payload": ("payload_up", "payload_down"), "until_wire": ("wire_up", "wire_down"),
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The constants of a run."""

    run_id: str
    size: int
    metric: str
    protected: bool = False  # a reply tells nothing of its client: under masks, or with differential privacy
    simulated: bool = False
    masked: bool = False  # it has phases
    sampled: bool = False  # its tables tell nothing of who took part: Poisson sampling


@dataclass(frozen=True)
class Explainer:
    """Stores the explanations of a run's rounds; `change` numbers the transaction."""

    connection: Connection
    facts: Facts
    change: int

    @property
    def run_id(self) -> str:
        """Return the run's id."""
        return self.facts.run_id

    def store(
        self, closed: Collection[int], late: Mapping[int, set[str]], bytes_: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Explain the rounds that are `closed` now, and again those closed before that waited for a device in `late`.

        `late` maps a round to the devices whose assignments changed, and `bytes_` one to what was added to its columns
        of bytes.
        """
        for number in sorted(bytes_):
            self._add_late_bytes(number, bytes_[number])
        before = self._waited_for(late)
        if not closed and not before:
            return
        totals = RunTotals.from_json(self.connection.scalar(_TOTALS, {"the_run": self.run_id}) or {})
        for number in sorted({*closed, *before}):
            if (row := self._round(number)) is None:
                continue  # a journal without its opening
            told = self._explain(row)
            if number in before:
                totals.add(stored(row.round, row.seconds, row.explanation), -1)
            totals.add(told)
            totals.saw(len(row.selected))
            until = self._until(row) if number in closed else {}
            key = {"the_run": self.run_id, "the_round": number}
            self.connection.execute(_ROUND.values(explanation=told.to_json(), changed=self.change, **until), key)
        self.connection.execute(_RUN.values(totals=totals.to_json()), {"the_run": self.run_id})
        counts = [
            {"the_run": self.run_id, "the_device": name, "slow": totals.slowest[name], "silent": totals.missed[name]}
            for name in sorted(totals.slowest.keys() | totals.missed.keys())
        ]
        if counts:
            self.connection.execute(_CLIENT, counts)

    def _add_late_bytes(self, number: int, amounts: Mapping[str, int]) -> None:
        """Add the bytes of a closed round to the sums until it and until each closed round after it."""
        more: dict[str, Any] = {}
        for name, parts in UNTIL.items():
            if any(part in amounts for part in parts):
                more[name] = func.coalesce(getattr(Round, name), 0) + sum(amounts.get(part, 0) for part in parts)
        if more:
            since = update(Round).where(Round.run_id == self.run_id, Round.round >= number, Round.until_s.is_not(None))
            self.connection.execute(since.values(changed=self.change, **more))

    def _waited_for(self, late: Mapping[int, set[str]]) -> set[int]:
        """Return the rounds that are explained already, and whose explanation these devices may have changed."""
        if not late:
            return set()
        wanted = select(Round.round, Round.explanation).where(Round.run_id == self.run_id, Round.round.in_(late))
        return {
            number
            for number, said in self.connection.execute(wanted)
            if said and (self.facts.masked or not late[number].isdisjoint(said["waited_for"]))
        }

    def _round(self, number: int) -> RoundRow | None:
        wanted = columns_of(Round, RoundRow, arrived=literal(0))
        found = self.connection.execute(wanted.where(Round.run_id == self.run_id, Round.round == number))
        row = found.mappings().first()
        return None if row is None else RoundRow(**row)

    def _explain(self, row: RoundRow) -> RoundExplanation:
        """Return the explanation of a closed round from its rows."""
        own = self._updates(Update.round == row.round)
        missing = sorted({*row.aggregated} - {one.update_id for one in own})
        earlier = [
            one
            for start in range(0, len(missing), MANY)
            for one in self._updates(Update.update_id.in_(missing[start : start + MANY]))
        ]
        before = select(Round.closed_at).where(Round.run_id == self.run_id, Round.round == row.round - 1)
        closed_at = self.connection.scalar(before) if row.round > 1 else 0.0
        return why(
            row, own, earlier, turn_at(row, closed_at), simulated=self.facts.simulated, rtts=self._rtts(own, earlier),
            phases=self._phases(row.round) if self.facts.masked else None,
        )  # fmt: skip

    def _updates(self, where: Any) -> list[UpdateRow]:
        wanted = columns_of(Update, UpdateRow).where(Update.run_id == self.run_id, where)
        ordered = wanted.order_by(Update.round, Update.device, Update.assigned_at)
        return [UpdateRow(**found) for found in self.connection.execute(ordered).mappings()]

    def _phases(self, number: int) -> list[PhaseRow]:
        wanted = select(RoundPhase.__table__).where(RoundPhase.run_id == self.run_id, RoundPhase.round == number)
        return phase_rows(dict(found) for found in self.connection.execute(wanted).mappings())

    def _rtts(self, *rows: Sequence[UpdateRow]) -> dict[str, float]:
        """Return the measured round trips of the devices that made requests; none in a simulation."""
        devices = sorted({one.device for part in rows for one in part if one.requests})
        if self.facts.simulated or not devices:
            return {}
        wanted = select(Measure.device, Measure.p50).where(Measure.kind == "rtt", Measure.p50 > 0)
        found: dict[str, float] = {}
        for start in range(0, len(devices), MANY):
            some = wanted.where(Measure.device.in_(devices[start : start + MANY]))
            found |= {device: seconds for device, seconds in self.connection.execute(some) if seconds is not None}
        return found

    def _until(self, row: RoundRow) -> dict[str, Any]:
        """Return the sums from the run's start until the end of this round."""
        last = select(Round.until_s, Round.until_payload, Round.until_wire).where(Round.run_id == self.run_id)
        last = last.where(Round.round < row.round, Round.until_s.is_not(None)).order_by(Round.round.desc())
        found = dict(self.connection.execute(last.limit(1)).mappings().first() or {})
        sums: dict[str, Any] = {"until_s": (found.get("until_s") or 0.0) + (row.seconds or 0.0)}
        for name, parts in UNTIL.items():
            amounts = [getattr(row, part) for part in parts] + [found.get(name)]
            measured = [amount for amount in amounts if amount is not None]
            sums[name] = sum(measured) if measured else None
        return sums


_TOTALS = select(Run.totals).where(Run.run_id == bindparam("the_run"))
_RUN = update(Run).where(Run.run_id == bindparam("the_run"))
_ROUND = update(Round).where(Round.run_id == bindparam("the_run"), Round.round == bindparam("the_round"))
_CLIENT = (
    update(Client)
    .where(Client.run_id == bindparam("the_run"), Client.device == bindparam("the_device"))
    .values(
        times_slowest=Client.times_slowest + bindparam("slow"), times_silent=Client.times_silent + bindparam("silent")
    )
)
