"""Follow a run by its journal: one line on stderr for each round, and a live sentence below it on a terminal.

`Teller` is a state machine without I/O: events in, lines out. It works the same on live events and on a journal of the
past. `follow` reads the journal, prints the lines, and reports when the aggregator goes down or is running again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import as_typed, note
from thinwire.cli.local_state import absence_text, alive, end_abandoned, start_hint
from thinwire.core.events import ENDED, NO_STEP
from thinwire.core.formatting import CHOSEN, NOTHING, capped_text, counted, duration, figure, size
from thinwire.core.signals import interruptible

if TYPE_CHECKING:
    from collections.abc import Callable

    from thinwire.core.events import (
        ClientFailed,
        ClientReconnected,
        ClientSelected,
        Event,
        RoundClosed,
        RunStatusChanged,
        StateLost,
        UpdateAccepted,
    )
    from thinwire.store import Store


STATUS_READ_S = 0.2  # between two reads of the run's events
ALIVE_S = 3.0  # between two checks that the aggregator is running


def follow(store: Store, run_id: str, home: Path | None = None, watch_aggregator: bool = True) -> int:
    """Print a run's progress until it is over and return its exit code; Ctrl-C leaves the run as it is.

    With `watch_aggregator` the run needs the aggregator, and its absence is reported. Without it the run's own process
    may die, and the run is then closed.
    """
    from thinwire.core.run_events import is_sampled
    from thinwire.reports.reason_text import behind

    hides = is_sampled(store.run(run_id).plan)
    teller, seen, looked, gone = Teller(hides_sample=hides), 0, float("-inf"), ""
    with screen() as (tell, show), interruptible() as look:
        while True:
            look()
            for seq, event in store.events(run_id, after=seen):
                seen = seq
                for line in teller.hear(event):
                    tell(line)
            if teller.over:
                break
            if not watch_aggregator and time.monotonic() - looked > ALIVE_S:
                looked = time.monotonic()
                end_abandoned(home)
            if watch_aggregator and time.monotonic() - looked > ALIVE_S:
                was_gone, looked = gone, time.monotonic()
                gone = "" if alive(home) else was_gone or absence_text(home)
                if gone and not was_gone:
                    tell(f"{gone}; the run goes on when one does: {start_hint(home)}")
                elif was_gone and not gone:
                    tell("an aggregator is running again")
            waits = behind(store.run(run_id), store.run_queue()) if teller.status == "queued" else ""
            show(f"{run_id}: {gone or waits or teller.now}")
            time.sleep(STATUS_READ_S)
        tell(f"{run_id} {teller.status}: {teller.text}")
    return teller.exit_code


@contextmanager
def screen() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield (tell, show): `tell` prints a line for good, `show` replaces the live sentence.

    Without a terminal `show` prints only new sentences on waiting.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, highlight=False)
        with console.status("") as status:
            yield (
                lambda text: console.print(as_typed(text), markup=False),
                lambda text: status.update(Text(as_typed(text))),
            )
        return
    shown = [""]

    def show(text: str) -> None:
        if "waiting" in text and text != shown[0]:  # a log shows why nothing happens, but not every reply
            note(text)
        shown[0] = text

    yield note, show


HEADER = f"{'round':>5}  {'closed':<8}  {'replies':>7}  {'accuracy':>8}  {'loss':>8}  {'payload':>8}  {'seconds':>7}"

HELD = 8  # buffered rounds that a line waits for: replies to later ones evaluate its version
SHOWN = 3  # capped updates that a line names


@dataclass
class Round:
    """The figures of one round, collected from its events."""

    number: int
    selected: int
    accepted: int = 0
    late: int = 0
    failed: list[str] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)  # replacements that were selected during the round
    restarted: list[str] = field(default_factory=list)  # devices that lost their state and started again
    payload_up: int = 0
    closed: RoundClosed | None = None
    target_updates: int = 0
    phase: str = ""  # the open phase of a round with secure aggregation
    messages: dict[str, int] = field(default_factory=dict)  # closed phase -> bytes of keys, shares or signatures

    @property
    def of(self) -> int:
        """Return the expected number of replies.

        In buffered mode this is the buffer size, because a reply may answer an assignment of an earlier round.
        """
        return (
            self.target_updates
            if self.closed and self.closed.reason == "buffer"
            else max(self.selected, self.target_updates)
        )

    def note(self, event: ClientSelected | StateLost | ClientFailed | ClientReconnected) -> None:
        """Record an event that the round's line mentions behind its figures."""
        from thinwire.core import events

        device = event.device
        match event:
            case events.ClientSelected():
                self.selected += bool(event.why)
                self.instead += [f"{device} instead of {event.instead_of}"] if event.why and event.instead_of else []
            case events.StateLost():
                self.restarted.append(f"{device} began again: its state was {event.why}")
            case events.ClientFailed() if not event.is_over:
                self.failed.append(f"{device} {event.kind}")
            case events.ClientReconnected():
                self.failed = [f"{device} was offline" if said == f"{device} offline" else said for said in self.failed]

    def line(self, metrics: dict[str, float], evaluates: bool = False) -> str:
        """Return the line of a closed round with the metrics of the model that it made.

        `evaluates` is True if the run's models are evaluated at all.
        """
        closed = self.closed
        assert closed is not None
        notes = [f"late {self.late}"] if self.late else []
        notes += [f"waits for {', '.join(closed.outstanding)}"] if closed.outstanding else []
        notes += [*self.failed, *self.instead, *self.restarted]
        if self.phase and evaluates and not metrics and closed.reason not in NO_STEP:
            from thinwire.reports.secure_rounds import NO_NEXT_SUM

            notes.append(NO_NEXT_SUM)  # the line of a round that another follows waits for its sum
        capped = [f"{update_id.split('/')[1]}: {capped_text(one)}" for update_id, one in closed.capped.items()]
        notes += capped[:SHOWN] + ([f"{len(capped) - SHOWN} more weights capped"] if capped[SHOWN:] else [])
        if closed.chosen:
            notes.append(f"{CHOSEN}: {', '.join(sorted(one.split('/')[1] for one in closed.chosen))}")
        cells = (
            f"{self.number:>5}",
            f"{closed.reason:<8}",
            f"{f'{len(closed.aggregated)}/{self.of}' if self.of else NOTHING:>7}",
            f"{figure(metrics.get('accuracy')):>8}",
            f"{figure(metrics.get('loss')):>8}",
            f"{size(self.payload_up + sum(self.messages.values()) if self.of else None):>8}",
            f"{closed.seconds:>7.2f}",
            "; ".join(notes),
        )
        return "  ".join(cells).rstrip()


@dataclass
class Teller:
    """A run's progress as a state machine without I/O: events in, lines out.

    The line of a round is ready when its model was evaluated, or will not be. The table's header comes before the first
    line; `headed` is True from then on.
    """

    rounds: dict[int, Round] = field(default_factory=dict)
    open: dict[int, Round] = field(default_factory=dict)  # those of `rounds` that are not closed
    last: Round | None = None  # the closed one with the highest number
    waiting: list[int] = field(default_factory=list)  # closed rounds whose model is not evaluated yet
    behind: dict[int, list[str]] = field(default_factory=dict)  # by such a round: lines of later events, held back
    faults: set[tuple[str, str]] = field(default_factory=set)  # (kind, text) of failures that were printed in full
    status: str = ""
    text: str = ""
    exit_code: int = 0
    headed: bool = False
    evaluates: bool = False  # a model of the run was evaluated
    hides_sample: bool = False  # Poisson sampling: nothing of who took part is shown

    @property
    def over(self) -> bool:
        """Return True if the run has ended."""
        return self.status in ENDED

    @property
    def now(self) -> str:
        """Return a sentence on the present state of the run."""
        one = next(iter(self.open.values()), None)
        if one is None or self.status != "running":
            return self.text or self.status
        if not one.of:
            return f"round {one.number} ends at its deadline" + self._before()
        phase = f", phase {one.phase}" if one.phase else ""
        return f"round {one.number}: {one.accepted} of {counted(one.of, 'reply', 'replies')}{phase}" + self._before()

    @property
    def _ahead(self) -> int:
        """Return the number of open rounds: with pipelined rounds a version is evaluated that many rounds later."""
        return len(self.open)

    def then(self, lines: list[str]) -> list[str]:
        """Return lines that are ready to print after those of the closed rounds.

        While the line of a closed round waits for its evaluation, these lines are held back and the result is empty.
        """
        if not self.waiting:
            return lines
        self.behind.setdefault(self.waiting[-1], []).extend(lines)
        return []

    def _before(self) -> str:
        """Return a note on the last closed round: with quick rounds an open one is seldom seen with a reply."""
        last = self.last
        if last is None or last.closed is None:
            return ""
        came = f"{len(last.closed.aggregated)} of {last.of} in " if last.of else ""
        return f" (round {last.number}: {came}{duration(last.closed.seconds)})"

    def hear(self, event: Event) -> list[str]:
        """Handle one event and return the lines that are now ready."""
        from thinwire.core.run_events import without_sample

        shown = without_sample(event) if self.hides_sample else event
        return [] if shown is None else self._hear(shown)

    def _hear(self, event: Event) -> list[str]:
        from thinwire.core import events
        from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed, PhaseClosed
        from thinwire.core.types import PHASES
        from thinwire.reports import reason_text

        match event:
            case PhaseClosed() if event.round in self.rounds:
                follows = PHASES.index(event.phase) + 1
                self.rounds[event.round].phase = PHASES[min(follows, len(PHASES) - 1)]
                if event.phase != "masked":  # its messages are the updates
                    self.rounds[event.round].messages[event.phase] = sum(event.received.values())
            case events.RunStatusChanged():
                return self._status(event)
            case events.RunNoted() | FirstModelAssigned() | FirstModelFailed():
                return [reason_text.sentence(event.note)]
            case events.RoundOpened():
                opened = Round(event.round, len(event.assignments), target_updates=event.target_updates)
                self.rounds[event.round] = self.open[event.round] = opened
            case events.UpdateAccepted():
                self._accept(event)
            case events.RoundClosed():
                one = self.rounds.setdefault(event.round, Round(event.round, len(event.aggregated)))
                one.closed = event
                self.open.pop(event.round, None)
                if self.last is None or one.number > self.last.number:
                    self.last = one
                lines = self._flush({}, before=event.round - (HELD if event.reason == "buffer" else self._ahead))
                self.waiting.append(event.round)
                return lines
            case events.Evaluated():
                self.evaluates = event.clients > 0  # the next round has no part in a holdout evaluation
                return self._flush(event.decisive, before=event.round + 1, measured=event.round)
            case events.ClientSelected() | events.StateLost() | events.ClientFailed() | events.ClientReconnected():
                if event.round in self.rounds:
                    self.rounds[event.round].note(event)
                return self._fault(event) if isinstance(event, events.ClientFailed) else []
        return []

    def _fault(self, event: ClientFailed) -> list[str]:
        """Return the full text of a failure, the first time only; the lines of rounds show its kind alone."""
        fault = (event.kind, event.text)
        if event.kind == "offline" or event.is_over or not event.text or fault in self.faults:
            return []
        self.faults.add(fault)
        from thinwire.reports.alerting import NON_FINITE, SMALLER_STEPS

        hint = f" (try {SMALLER_STEPS})" if event.kind == NON_FINITE else ""
        return [f"{event.device} {event.kind}: {event.text}{hint}"]

    def _accept(self, event: UpdateAccepted) -> None:
        """Count an accepted update."""
        heard = self.rounds.setdefault(event.round, Round(event.round, 0))
        heard.accepted += 1
        heard.late += event.late
        heard.payload_up += sum(part["length"] for part in event.header.get("parts", ()))

    def _status(self, event: RunStatusChanged) -> list[str]:
        """Record a new status of the run, and return all held lines if the run is over."""
        self.status, self.text, self.exit_code = event.status, event.text, event.exit_code
        return self._flush({}, before=1 << 62) if self.over else []

    def _flush(self, metrics: dict[str, float], before: int, measured: int = -1) -> list[str]:
        """Return the lines of the waiting rounds below `before`; `metrics` are those of round `measured`."""
        ready = [number for number in self.waiting if number < before]
        self.waiting = [number for number in self.waiting if number >= before]
        lines = [HEADER] if ready and not self.headed else []
        self.headed = self.headed or bool(ready)
        for number in ready:
            line = self.rounds[number].line(metrics if number == measured else {}, self.evaluates)
            lines += [line, *self.behind.pop(number, ())]
        return lines
