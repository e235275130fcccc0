"""What the verdicts that come with an ask make of a run's state: what was dropped is taken back, from where it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thinwire.aggregation.algorithms import algorithm_of, carried, followed
from thinwire.client import outbox
from thinwire.client.answering import exchange
from thinwire.client.disk.state import Entry, RunFolder, RunState
from thinwire.client.failures import CannotAnswer
from thinwire.core.errors import BadPayload

if TYPE_CHECKING:
    from thinwire.core.layout import Layout, Segment
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Ask, Vector, Verdict


@dataclass(frozen=True)
class Settling:
    """Applies the verdicts of one ask to a run's state. `layout` is the model's, `device` this one's name.

    Law: a plan by which both ends go on from what was sent (`plan.remembered`) never loses count of it: where the disk
    has lost some of it the device says `state-lost`.
    """

    ask: Ask
    plan: RunPlan
    layout: Layout
    device: str
    folder: RunFolder
    say: Callable[[str], None]

    def settled(self, state: RunState) -> RunState:
        """The state after the ask's verdicts, and without what is too old for one."""
        ask = self.ask
        if state.layout_digest not in ("", self.layout.digest):
            self.say(f"{ask.run}: the model has changed; what was not yet sent of the old one is lost")
            state = RunState(sequence=state.sequence, identity=state.identity)
        settled = outbox.settle(outbox.begun_anew(state, ask.references_from), self.verdicts, self._back)
        if ask.kind != "train" or self.plan.remembered:  # it has to know what became of each of its updates
            return settled
        return outbox.expire(settled, ask.round, self.plan.cohort.max_staleness + self.plan.local.delay)

    @property
    def verdicts(self) -> list[Verdict]:
        """Those of the ask that are on this device's answers."""
        return [verdict for verdict in self.ask.verdicts if verdict.update_id.device == self.device]

    def require_memory(self, state: RunState) -> None:
        """Where the aggregator's sum holds what this device sent before, it goes on from there, or not at all."""
        held = state.residual if self.plan.uplink.feedback == "ef21" else state.own
        if state.lost or (state.encoded_at and held is None):
            what = "ef21" if self.plan.uplink.feedback == "ef21" else self.plan.run.algorithm
            raise CannotAnswer(
                "state-lost",
                f"what {what} has sent of this device is not on its disk any more: join under another name",
            )

    def _back(self, entry: Entry, state: RunState) -> RunState:
        """The state as if a dropped update had not been sent."""
        feedback, algorithm = self.plan.uplink.feedback, algorithm_of(self.plan)
        travels = carried(algorithm, self.layout)
        try:
            if feedback != "none":
                sign = -1.0 if feedback == "ef21" else 1.0
                residual = self._added(entry, travels, travels.model_segments, state.residual, sign)
                state = replace(state, residual=residual)
            if algorithm is not None:
                state = replace(state, own=self._added(entry, travels, followed(algorithm, travels), state.own, -1.0))
        except (OSError, BadPayload) as error:
            if self.plan.remembered:
                raise CannotAnswer(
                    "state-lost", f"an update that was not used cannot be taken back: {error}"
                ) from error
            self.say(f"round {entry.round}: its update was not used, and is damaged on this disk: {error}")
            return state
        goes_on = ", it goes into the next one" if feedback != "none" else ""
        self.say(f"round {entry.round}: its update was not used{goes_on}")
        return state

    def _added(
        self, entry: Entry, travels: Layout, segments: tuple[Segment, ...], to: Vector | None, sign: float
    ) -> Vector:
        head = entry.head
        return exchange.refund(self.folder.path(entry), head.parts, head.codec, travels, to, sign, segments)
