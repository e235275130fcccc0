"""A run with a fault, and what came of it: beside a run without the fault that takes in the same answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.document import note
from benchmarks.faults.at_device import DEVICE
from benchmarks.faults.cases import Case
from benchmarks.processes import descendants, free_port
from tests.support.alike import Alike, alike
from tests.support.frozen import signal_all
from tests.support.gated_task import DEVICES, NOTHING, Fault, Gated, gated_run
from tests.support.moments import Moment
from tests.support.processes import Site
from tests.support.run_outcome import double_aggregations, identical_share, lost_updates
from thinwire.core.events import Event, RoundOpened, UpdateAccepted, UpdateDropped


def unanswered(events: Sequence[Event]) -> int:
    """Assignments of which no answer counted."""
    came = {e.assignment_id for e in events if isinstance(e, UpdateAccepted)} - {
        e.assignment_id for e in events if isinstance(e, UpdateDropped) and e.reason == "bad-payload"
    }
    return sum(
        assignment not in came for e in events if isinstance(e, RoundOpened) for assignment in e.assignments.values()
    )


@dataclass
class Judge:
    """Makes runs in `folder`; those without a fault are made once for all that they are compared with."""

    folder: Path
    patient: bool = False
    faultless: dict[tuple[object, ...], list[Event]] = field(default_factory=dict)

    def row(self, name: str, case: Case, rounds: int, moments: Sequence[Moment], home: Path) -> dict[str, Any]:
        """Return the row of a fault. AssertionError: something did not come to an end, or no strike met its aim."""
        run = self._made(home, name, case, case.fault, rounds, moments)
        events = run.events
        struck = (
            run.struck if case.strikes else sum(DEVICE in e.assignments for e in events if isinstance(e, RoundOpened))
        )
        met = case.told(events) if case.told else run.met
        assert met, f"{name}: none of {struck} strikes met its aim"
        like = alike(events, DEVICES)
        share, why = self._identical(name, case, rounds, events, like)
        return {
            "fault": name,
            "struck": struck,
            "met": met,
            "late": run.late,
            "patient": self.patient,
            "lost_updates": lost_updates(events),
            "double_aggregations": double_aggregations(events),
            "unanswered": unanswered(events),
            "late_answers": len(like.late),
            "identical_share": share,
            "identical_why": why,
            "who": case.who,
            "recovery_s": max(run.recovered_s) if case.who and run.recovered_s else None,
            "recoveries_s": [round(seconds, 3) for seconds in run.recovered_s],
            "load": os.getloadavg()[0],  # of all that ran here: seconds beside others say little
        }

    def _identical(
        self, name: str, case: Case, rounds: int, events: Sequence[Event], like: Alike
    ) -> tuple[float | None, str]:
        """The share of versions that are as without the fault; or none, and why it cannot be judged."""
        like = like if case.costs else Alike()
        if like.why_not:
            return None, like.why_not
        key = (rounds, case.fault.sets, case.example, like.key)
        if key not in self.faultless:
            home = self.folder / f"faultless-{len(self.faultless)}"
            nothing = Fault(NOTHING.strike, sets=case.fault.sets)
            self.faultless[key] = self._made(home, f"{name}, without it", case, nothing, rounds, (), like).events
        return identical_share(events, self.faultless[key]), ""

    def _made(
        self, folder: Path, name: str, case: Case, fault: Fault, rounds: int, moments: Sequence[Moment],
        like: Alike | None = None,
    ) -> Gated:  # fmt: skip
        folder.mkdir(exist_ok=True)
        site = Site(folder / "home")
        site.forks = False  # seconds until a process is there again are measured
        site.example = case.example
        if case.page:
            site.page = ("--dashboard", f"127.0.0.1:{free_port()}")
        began = time.monotonic()

        def tell(line: str) -> None:
            note(f"{time.monotonic() - began:6.1f} s  {name}: {line}")

        tell(f"a run of {rounds} rounds begins")
        try:
            return gated_run(site, rounds, moments, fault, patient=self.patient, tell=tell, like=like)
        finally:
            for process in site.processes:  # what is frozen cannot be ended, and what it started would stay
                if process.poll() is None:
                    signal_all(signal.SIGCONT, descendants(process.pid))
            site.close()
