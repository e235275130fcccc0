"""Who holds a run's plan, so that an ask need only name it, and what becomes of an ask whose plan was not there.

A device that has lost the plan says `need-plan` and gets the same ask again with the whole plan: the round waits, and
nothing counts against the device. Nothing of this is journalled: what an ask carries changes no answer, and after a
restart the devices' hellos say what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from thinwire.core.fleet import Arrival, Envelope, Hello, NodeJoined
from thinwire.core.types import Failure, ReplyHead
from thinwire.server.driving.last_asked import LastAsked


class Holders:
    """Which devices hold the plan of one run.

    A device holds the plan when its hello says so, or when it answered an ask that carried it.

    Law: an ask is sent again at most once, and only to the device that it went to. A device has `most` asks at once.
    """

    def __init__(self, plan: Mapping[str, Any], digest: str, most: int) -> None:
        self.plan, self.digest = plan, digest
        self._sure: dict[str, bool] = {}  # device -> what was learned since its hello, against which this counts
        self._last = LastAsked(most)

    def plan_for(self, device: str, hello: Hello | None) -> Mapping[str, Any] | str:
        """The plan as an ask to this device carries it."""
        said = hello is not None and self.digest in hello.plans
        return self.digest if self._sure.get(device, said) else self.plan

    def asked(self, envelopes: Sequence[Envelope]) -> None:
        self._last.remember(envelopes)

    def sent(self, device: str, ask_id: str) -> bool:
        """Whether an ask went to this device since this process began, and has not failed: then it is delivered again
        by itself.
        """
        return self._last.find(device, ask_id) is not None

    def take(self, arrival: Arrival, anew: bool) -> Envelope | None:
        """What to send again for this; None: it is nothing of ours. `anew`: a hello that says something else."""
        match arrival:
            case NodeJoined(device):
                if anew:
                    self._sure.pop(device, None)  # another process: its hello knows best
            case ReplyHead():
                if (last := self._last.find(arrival.update_id.device, arrival.ask_id)) is not None:
                    self._sure[last.device] = True
            case Failure("need-plan", _, ask_id, device):
                self._sure[device] = False
                last = self._last.find(device, ask_id)
                if last is not None and isinstance(last.ask.plan, str):
                    again = replace(last, ask=replace(last.ask, plan=self.plan))
                    self._last.remember([again])
                    return again
                self._last.forget(device, ask_id)
            case Failure(_, _, ask_id, device):
                self._last.forget(device, ask_id)
        return None
