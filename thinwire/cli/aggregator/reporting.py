"""The aggregator's log: one line for each thing that its operator may have to react to, as it happens.

`HOME/aggregator/aggregator.log` has devices that join, connect and disconnect, runs that begin, wait and end, rounds
without a step, and the failures of devices; `thinwire aggregator logs` shows it. What every round brings is not in it:
`thinwire runs watch` and the dashboard show that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from thinwire.core.events import (
    ENDED,
    NO_STEP,
    OVER,
    ClientFailed,
    DeviceOffline,
    DeviceOnline,
    Event,
    RoundClosed,
    RunNoted,
    RunStatusChanged,
)
from thinwire.core.formatting import counted
from thinwire.core.run_events import is_sampled, without_sample

if TYPE_CHECKING:
    from thinwire.store import Store

AGGREGATOR_LOG = "aggregator.log"
ACTIONS_S = 1.0  # between two looks for new actions on devices
MOST_ACTIONS = 100  # reported at one look
ACTIONS = {
    "enrol": "{device} is new ({detail}); a pending one waits for: thinwire devices approve {device}",
    "join": "{device} has joined with an invitation",
    "add": "{device} is known now",
    "approve": "{device} is approved by {who}",
    "revoke": "{device} is revoked by {who}",
    "leave": "{device} has left",
    "rename": "{device} is a new name: it {detail} before",
}


class Reporter:
    """Reports events of runs and devices as lines to `say`; any thread may call it.

    A failure of a device is reported when its kind or its text is new in that run.
    """

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._faults = set[tuple[str, str, str, str]]()
        self._sampled: dict[str, bool] = {}
        self._statuses: dict[str, str] = {}
        self._acted_at = max((one.at for one in store.audit.actions(limit=1)), default=0.0)

    def event(self, run_id: str, event: Event) -> None:
        """Report an event of a run, or with an empty `run_id` of a device, if an operator may have to know it."""
        for line in self._lines(run_id, event):
            self._say(f"{run_id}: {line}" if run_id else line)

    def actions(self) -> None:
        """Report what people and devices did to the registry of devices since the last call."""
        found = [one for one in self._store.audit.actions(limit=MOST_ACTIONS) if one.at > self._acted_at]
        for one in reversed(found):
            self._acted_at = one.at
            if (said := ACTIONS.get(one.what)) is not None:
                self._say(said.format(device=one.device, who=one.who, detail=one.detail))

    def _lines(self, run_id: str, event: Event) -> Iterator[str]:
        from thinwire.reports.reason_text import sentence

        secret = bool(run_id) and self._is_sampled(run_id)
        if (shown := without_sample(event) if secret else event) is None:
            return
        match event := shown:
            case DeviceOnline():
                yield f"{event.device} is online"
            case DeviceOffline():
                yield f"{event.device} is offline: {event.why}"
            case RunStatusChanged():
                if event.status in ENDED:
                    self._faults -= {fault for fault in self._faults if fault[0] == run_id}
                before, self._statuses[run_id] = self._statuses.get(run_id), event.status
                if event.status != before or event.status != "running":  # each round of a running run changes the text
                    yield f"{event.status}{f': {event.text}' if event.text else ''}"
            case RunNoted():
                yield sentence(event.note)
            case RoundClosed() if event.reason in NO_STEP:
                came = "" if secret else f": {counted(len(event.aggregated) + len(event.dropped), 'update')}"
                yield f"round {event.round} ended without a step ({event.reason}), after {event.seconds:.1f} s{came}"
            case ClientFailed() if event.kind != OVER:
                if (fault := (run_id, event.device, event.kind, event.text)) not in self._faults:
                    self._faults.add(fault)
                    yield f"{event.device} {event.kind}{f': {event.text}' if event.text else ''}"

    def _is_sampled(self, run_id: str) -> bool:
        """Return True if nobody may see who took part in a round of this run."""
        if run_id not in self._sampled:
            self._sampled[run_id] = is_sampled(self._store.run(run_id).plan)
        return self._sampled[run_id]
