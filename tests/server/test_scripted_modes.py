"""The laws of whole runs: where devices fill a buffer, stop training in time, or are selected down a ladder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stories import DEADLINE_S, NAMES, ROUNDS, Story, drawn, whole_runs
from tests.support.story_laws import (
    a_buffer_holds_one_update_of_a_device_and_no_more_than_it_has_places,
    a_buffer_never_waits_for_nobody,
    a_round_closes_as_soon_as_nobody_can_answer,
    tell,
)
from thinwire.core import RunPlan
from thinwire.core.events import RoundOpened, UpdateAccepted
from thinwire.core.fleet import Delivery
from thinwire.core.types import ReplyHeader
from thinwire.simulation import Behavior, SyntheticUpdates
from thinwire.simulation.scripted_device import ReplyWithParts

STEPS = 8
LADDER = ["identity", "fp16", "int8", "sign"]  # a constant comes out of each as it went in
EXAMPLES = 12  # whole runs of each kind


@dataclass
class Stopping(SyntheticUpdates):
    """Stops training when sending would no longer fit into its deadline, but not before the fewest steps."""

    least: int = 1
    made: dict[str, int] = field(default_factory=dict)  # assignment_id -> steps

    def begin(self, delivery: Delivery, behavior: Behavior) -> Behavior:
        assignment, step_s = delivery.assignment, behavior.compute_s / STEPS
        left_s = 0.9 * assignment.deadline_s - behavior.download_s - behavior.sending_s(0)
        fit = STEPS if step_s * STEPS <= max(left_s, 0.0) else int(left_s / step_s)
        self.made[assignment.assignment_id] = steps = max(self.least, fit)
        return replace(behavior, compute_s=steps * step_s)

    def finish(self, delivery: Delivery, behavior: Behavior) -> ReplyWithParts:
        header, body = super().finish(delivery, behavior)
        assert isinstance(header, ReplyHeader)
        steps = self.made[delivery.assignment.assignment_id]
        return replace(header, steps=steps, a=float(steps), examples=self.examples * steps), body


def plan_of(draw: st.DrawFn, local: dict[str, Any], uplink: dict[str, Any], **cohort: Any) -> RunPlan:
    given = {
        "wait_for": 2, "wait_s": 100.0, "min_updates": draw(st.sampled_from([0.5, 1, 2])), "deadline_s": DEADLINE_S,
        "max_staleness": draw(st.integers(1, 3)), "retry_limit": 3, **cohort,
    }  # fmt: skip
    run = {"task": "toy", "rounds": ROUNDS, "seed": draw(st.integers(0, 9))}
    return RunPlan.from_json({"run": run, "cohort": given, "local": {"lr": 1.0, **local}, "uplink": uplink})


@st.composite
def buffered(draw: st.DrawFn) -> Story:
    places, buffer = draw(st.sampled_from([0, 0, 1, 2, 3])), draw(st.integers(1, 4))
    cohort = {"mode": "buffered", "buffer": buffer, "max_concurrency": places, "min_updates": 1}
    return drawn(draw, plan_of(draw, {}, {"codec": "identity"}, **cohort))


@st.composite
def partial_work(draw: st.DrawFn) -> Story:
    local = {"steps": STEPS, "partial": True, "min_steps": draw(st.integers(1, STEPS))}
    late = draw(st.sampled_from(["aggregate", "drop"]))
    plan = plan_of(draw, local, {"codec": "identity"}, late=late)
    return drawn(draw, plan, work=partial(Stopping, least=plan.local.min_steps))


@st.composite
def down_a_ladder(draw: st.DrawFn) -> Story:
    bytes_s = {name: draw(st.sampled_from([8.0, 16.0, 40.0, 400.0])) for name in NAMES}
    overlap = draw(st.sampled_from([None, None, {"max_delay": 1}]))
    clients = draw(st.sampled_from(["all", 3]))
    return drawn(draw, plan_of(draw, {"overlap": overlap}, {"ladder": LADDER}, clients=clients), bytes_s=bytes_s)


@settings(whole_runs, max_examples=EXAMPLES)
@given(buffered())
def test_buffers_hold_each_answer_once_and_wait_for_nobody(story: Story) -> None:
    made = tell(story)
    a_buffer_never_waits_for_nobody(made)
    a_buffer_holds_one_update_of_a_device_and_no_more_than_it_has_places(made)


@settings(whole_runs, max_examples=EXAMPLES)
@given(partial_work())
def test_rounds_of_devices_that_stop_early_weigh_the_steps_that_were_made(story: Story) -> None:
    made = tell(story)
    a_round_closes_as_soon_as_nobody_can_answer(made)
    assert all(story.plan.local.min_steps <= e.header["steps"] <= STEPS for e in made.of(UpdateAccepted))


@settings(whole_runs, max_examples=EXAMPLES)
@given(down_a_ladder())
def test_rounds_in_which_each_is_selected_in_its_own_codec_are_aggregated_by_it(story: Story) -> None:
    made = tell(story)
    a_round_closes_as_soon_as_nobody_can_answer(made)
    assert {codec for e in made.of(RoundOpened) for codec in e.codecs.values()} <= set(LADDER)
