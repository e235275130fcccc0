"""This module computes and stores the explanation of each closed round, and the sums over all rounds until it.

The projection calls `Explainer` in the transaction that closes a round. So a reader finds both in the round's row, and
no read depends on the number of rounds before it.

Invariant: the stored explanation equals that of `explain_round` on the rows as they are. A late reply, or a failure
after the round closed, changes the explanation only if the round had waited for its device, or has phases.

`RunTotals` holds the sums over the explanations of a run's rounds, which are kept beside the run; `explain_run` makes
the explanation of the run of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from sqlalchemy import (
    Connection,
    CursorResult,
    Double,
    Executable,
    Integer,
    String,
    bindparam,
    func,
    literal,
    select,
    update,
)

from thinwire.core.formatting import counted, duration
from thinwire.store.database import BoundedInteger, as_row, columns_of
from thinwire.store.queries import phase_rows
from thinwire.store.read_models import PhaseRow, RoundRow, UpdateRow
from thinwire.store.round_explanation import RoundExplanation, aggregator_text, explain_round, stored
from thinwire.store.round_timing import AGGREGATOR_STAGES, STAGES, turn_at
from thinwire.store.tables import Client, Measure, Round, RoundPhase, Run, Update

if TYPE_CHECKING:
    from thinwire.store.read_models import RunRow
    from thinwire.store.store import Store


MAX_VALUES: Final = 500  # values in one query
RUNNING_SUMS: Final[Mapping[str, tuple[str, ...]]] = {  # a sum from the run's start -> the columns of each round
    "until_payload": ("payload_up", "payload_down"), "until_wire": ("wire_up", "wire_down"),
}  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """Holds the constants of a run."""

    run_id: str
    size: int
    metric: str
    protected: bool = False  # with masks or differential privacy, a reply tells nothing of its client
    simulated: bool = False
    masked: bool = False  # with secure aggregation, its rounds have phases
    sampled: bool = False  # with Poisson sampling, its tables do not show which clients took part


@dataclass(frozen=True)
class Explainer:
    """Stores the explanations of a run's rounds; `change` numbers the transaction."""

    connection: Connection
    facts: RunFacts
    change: int

    @property
    def run_id(self) -> str:
        """Return the run's id."""
        return self.facts.run_id

    def store(
        self, closed: Collection[int], changed: Mapping[int, set[str]], bytes_: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Explain the rounds that are `closed` now, and again those closed before that waited for one of `changed`.

        `changed` maps a round to the devices whose assignments changed, and `bytes_` one to what was added to its
        columns of bytes.
        """
        for number in sorted(bytes_):
            self._add_late_bytes(number, bytes_[number])
        before = self._rounds_to_explain_again(changed)
        if not closed and not before:
            return
        totals = RunTotals.from_json(self._scalar(_TOTALS) or {})
        for number in sorted({*closed, *before}):
            if (row := self._round(number)) is None:
                continue  # a journal without its opening
            last = self._sums_before(row)
            told = self._explain(row, last)
            if number in before:
                totals.add(stored(row.round, row.seconds, row.explanation), -1)
            totals.add(told)
            totals.count_selected(len(row.selected))
            values = {"the_explanation": told.to_json(), "the_change": self.change}
            if number in closed:
                self._execute(_EXPLAIN_AND_SUM, the_round=number, **values, **self._sums_until(row, last))
            else:
                self._execute(_EXPLAIN, the_round=number, **values)
        self._execute(_NEW_TOTALS, the_totals=totals.to_json())
        counts = [
            {"the_run": self.run_id, "the_device": name, "slow": totals.slowest[name], "silent": totals.missed[name]}
            for name in sorted(totals.slowest.keys() | totals.missed.keys())
        ]
        if counts:
            self.connection.execute(_COUNT_CLIENT, counts)

    def _execute(self, statement: Executable, **values: Any) -> CursorResult[Any]:
        return self.connection.execute(statement, {"the_run": self.run_id, **values})

    def _scalar(self, statement: Executable) -> Any:
        return self.connection.scalar(statement, {"the_run": self.run_id})

    def _add_late_bytes(self, number: int, amounts: Mapping[str, int]) -> None:
        """Add the bytes of a closed round to the sums until it and until each closed round after it."""
        more: dict[str, Any] = {}
        for name, parts in RUNNING_SUMS.items():
            if any(part in amounts for part in parts):
                more[name] = func.coalesce(Round.c[name], 0) + sum(amounts.get(part, 0) for part in parts)
        if more:
            since = update(Round).where(
                Round.c.run_id == self.run_id, Round.c.round >= number, Round.c.until_s.is_not(None)
            )
            self.connection.execute(since.values(changed=self.change, **more))

    def _rounds_to_explain_again(self, changed: Mapping[int, set[str]]) -> set[int]:
        """Return the rounds that are explained already, and whose explanation these devices may have changed."""
        if not changed:
            return set()
        wanted = select(Round.c.round, Round.c.explanation).where(
            Round.c.run_id == self.run_id, Round.c.round.in_(changed)
        )
        return {
            number
            for number, said in self.connection.execute(wanted)
            if said and (self.facts.masked or not changed[number].isdisjoint(said["waited_for"]))
        }

    def _round(self, number: int) -> RoundRow | None:
        row = self._execute(_ROUND, the_round=number).mappings().first()
        return None if row is None else as_row(RoundRow, row)

    def _sums_before(self, row: RoundRow) -> dict[str, Any]:
        """Return when the round before was closed, and the sums until its end; {} for the first round."""
        return dict(self._execute(_BEFORE, the_round=row.round).mappings().first() or {})

    def _explain(self, row: RoundRow, last: Mapping[str, Any]) -> RoundExplanation:
        """Return the explanation of a closed round from those of its rows on which it depends."""
        own = self._updates(_UNUSUAL, the_round=row.round, the_slowest=row.slowest) if row.reason != "buffer" else []
        if not any(one.device == row.slowest for one in own):
            own = self._updates(_OF_THE_ROUND, the_round=row.round)
        earlier = self._updates(_OF_EARLIER_ROUNDS, the_round=row.round)
        return explain_round(
            row, own, earlier, turn_at(row, last.get("closed_at") if last else 0.0), simulated=self.facts.simulated,
            rtts=self._rtts(own, earlier), phases=self._phases(row.round) if self.facts.masked else None,
        )  # fmt: skip

    def _updates(self, statement: Executable, **values: Any) -> list[UpdateRow]:
        """Return assignments in order. SQLite sorts none: it would read a whole run by an index in this order."""
        found = [as_row(UpdateRow, one) for one in self._execute(statement, **values).mappings()]
        return sorted(found, key=lambda one: (one.round, one.device, one.assigned_at or 0.0))

    def _phases(self, number: int) -> list[PhaseRow]:
        return phase_rows(dict(found) for found in self._execute(_PHASES, the_round=number).mappings())

    def _rtts(self, *rows: Sequence[UpdateRow]) -> dict[str, float]:
        """Return the measured round trips of the devices that made requests; none in a simulation."""
        devices = sorted({one.device for part in rows for one in part if one.requests})
        if self.facts.simulated:
            return {}
        found: dict[str, float] = {}
        for start in range(0, len(devices), MAX_VALUES):
            links = self.connection.execute(_LINKS, {"devices": devices[start : start + MAX_VALUES]})
            found |= {device: seconds for device, seconds in links if seconds is not None}
        return found

    def _sums_until(self, row: RoundRow, last: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sums from the run's start until the end of this round."""
        if last and last["until_s"] is None:  # the round before is open
            last = dict(self._execute(_LAST_CLOSED, the_round=row.round).mappings().first() or {})
        sums: dict[str, Any] = {"until_s": (last.get("until_s") or 0.0) + (row.seconds or 0.0)}
        for name, parts in RUNNING_SUMS.items():
            amounts = [getattr(row, part) for part in parts] + [last.get(name)]
            measured = [amount for amount in amounts if amount is not None]
            sums[name] = sum(measured) if measured else None
        return {f"the_{name}": amount for name, amount in sums.items()}


# Each statement is made once, for every round calls it: to make one takes longer than to execute it.
_RUN, _NUMBER = bindparam("the_run", type_=String), bindparam("the_round", type_=Integer)
_TOTALS = select(Run.c.totals).where(Run.c.run_id == _RUN)
_NEW_TOTALS = update(Run).where(Run.c.run_id == _RUN).values(totals=bindparam("the_totals", type_=Run.c.totals.type))
_ROUND = columns_of(Round, RoundRow, arrived=literal(0)).where(Round.c.run_id == _RUN, Round.c.round == _NUMBER)
_SUMS = select(Round.c.closed_at, Round.c.until_s, Round.c.until_payload, Round.c.until_wire).where(
    Round.c.run_id == _RUN
)
_BEFORE = _SUMS.where(Round.c.round == _NUMBER - 1)
_LAST_CLOSED = (
    _SUMS.where(Round.c.round < _NUMBER, Round.c.until_s.is_not(None)).order_by(Round.c.round.desc()).limit(1)
)
_ASSIGNMENTS = columns_of(Update, UpdateRow).where(Update.c.run_id == _RUN)
_OF_THE_ROUND = _ASSIGNMENTS.where(Update.c.round == _NUMBER)
_UNUSUAL = _OF_THE_ROUND.where(  # the other rows add nothing to an explanation
    (Update.c.device == bindparam("the_slowest")) | (Update.c.outcome != "aggregated") | (Update.c.weight_reason != "")
)
_OF_EARLIER_ROUNDS = _ASSIGNMENTS.where(
    Update.c.aggregated_round == _NUMBER, Update.c.aggregated_round != Update.c.round
)
_PHASES = select(RoundPhase).where(RoundPhase.c.run_id == _RUN, RoundPhase.c.round == _NUMBER)
_LINKS = select(Measure.c.device, Measure.c.p50).where(
    Measure.c.kind == "rtt", Measure.c.p50 > 0, Measure.c.device.in_(bindparam("devices", expanding=True))
)
_EXPLAIN = (
    update(Round)
    .where(Round.c.run_id == _RUN, Round.c.round == _NUMBER)
    .values(
        explanation=bindparam("the_explanation", type_=Round.c.explanation.type),
        changed=bindparam("the_change", type_=BoundedInteger),
    )
)
_EXPLAIN_AND_SUM = _EXPLAIN.values(
    until_s=bindparam("the_until_s", type_=Double),
    until_payload=bindparam("the_until_payload", type_=BoundedInteger),
    until_wire=bindparam("the_until_wire", type_=BoundedInteger),
)
_COUNT_CLIENT = (
    update(Client)
    .where(Client.c.run_id == _RUN, Client.c.device == bindparam("the_device"))
    .values(
        times_slowest=Client.c.times_slowest + bindparam("slow"),
        times_silent=Client.c.times_silent + bindparam("silent"),
    )
)


ROUNDING_S: Final = 1e-9  # a sum of seconds below it is zero but for rounding


@dataclass
class RunTotals:
    """Holds the sums over the explanations of a run's rounds; `add` with the sign -1 takes an explanation out again."""

    rounds: int = 0
    seconds: float = 0.0
    requests: int = 0
    timed: int = 0  # requests of rounds with a measured round trip; their round trips took `trips_s`
    trips_s: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    uncounted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fewest: int | None = None  # clients selected for a round, as far as `count_selected` was called
    most: int = 0
    slowest: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)

    def add(self, one: RoundExplanation, sign: int = 1) -> None:
        """Add the explanation of a round."""
        self.rounds, self.seconds = self.rounds + sign, self.seconds + sign * one.seconds
        self.requests += sign * one.requests
        if one.rtt_s is not None:
            self.timed, self.trips_s = self.timed + sign * one.requests, self.trips_s + sign * one.requests * one.rtt_s
        for sums, parts in ((self.stages, one.stages), (self.uncounted, one.uncounted)):
            for name, took in parts.items():
                sums[name] += sign * took
        self.slowest.update({one.device: sign} if one.device else {})
        for name in one.waited_for:
            self.missed[name] += sign

    def count_selected(self, selected: int) -> None:
        """Record how many clients a round selected."""
        self.fewest = selected if self.fewest is None else min(selected, self.fewest)
        self.most = max(selected, self.most)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the sums that `to_json` gave, without a count of any client."""
        totals = cls(**{name: found[name] for name in STORED_NUMBERS if name in found})
        totals.stages.update(found.get("stages", {}))
        totals.uncounted.update(found.get("uncounted", {}))
        return totals

    def to_json(self) -> dict[str, Any]:
        """Return all sums but the counts of clients, as plain values."""
        parts = {"stages": self.stages, "uncounted": self.uncounted}
        kept = {
            name: {stage: took for stage, took in part.items() if took > ROUNDING_S} for name, part in parts.items()
        }
        return {name: getattr(self, name) for name in STORED_NUMBERS} | kept


STORED_NUMBERS: Final = ("rounds", "seconds", "requests", "timed", "trips_s", "fewest", "most")


def explain_rounds(found: Iterable[RoundExplanation]) -> RoundExplanation:
    """Return the explanation of a run from those of its rounds."""
    totals = RunTotals()
    for one in found:
        totals.add(one)
    return explain_run(totals)


def totals_of(store: Store, row: RunRow) -> RunTotals:
    """Return the stored sums over the closed rounds of a run, with the clients that were counted most often."""
    totals = RunTotals.from_json(row.totals)
    totals.slowest, totals.missed = map(Counter, store.most_waited_for(row.run_id))
    return totals


def explain_run(totals: RunTotals) -> RoundExplanation:
    """Return the explanation of a run: the stages' sums, and the device that was waited for most often."""
    spent = {name: totals.stages[name] for name in STAGES if totals.stages.get(name, 0.0) > 0}
    uncounted = {name: totals.uncounted[name] for name in AGGREGATOR_STAGES if totals.uncounted.get(name, 0.0) > 0}
    said = f"{counted(totals.rounds, 'round')} took {duration(totals.seconds)}"
    if spent and totals.seconds:
        most = max(spent, key=lambda name: spent[name])
        said += f", {100 * spent[most] / totals.seconds:.0f} % of it in the stage {most}"
    (device, count), (silent, times) = map(_most_frequent, (totals.slowest, totals.missed))
    said += f"; {device} was the slowest in {count} of {totals.rounds}" if count else ""
    said += f"; {silent} had not replied in time in {times}" if times else ""
    said += aggregator_text(totals.seconds, {}, uncounted)
    rtt_s, device = totals.trips_s / totals.timed if totals.timed else None, device if count else ""
    return RoundExplanation(0, totals.seconds, f"{said}.", device, spent, (), totals.requests, rtt_s, uncounted)


def _most_frequent(counts: Counter[str]) -> tuple[str, int]:
    """Return the client that was counted most often, of several the first by name; ("", 0) if there is none."""
    return min(counts.items(), key=lambda one: (-one[1], one[0]), default=("", 0))
