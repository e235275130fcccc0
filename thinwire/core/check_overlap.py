"""What cannot be where devices train on while their updates travel, and why."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.core.all_sections import Sections
from thinwire.core.refusal import Refusal

WITHOUT = "leave [local] overlap out"


def overlap_refusals(plan: Sections) -> Iterator[Refusal]:
    """Refusals of `[local] overlap` beside the plan's other keys; scaffold and feddyn refuse it themselves."""
    if not plan.local.overlap:
        return
    for given, what, why, hint in (
        (plan.cohort.mode == "buffered", '[cohort] mode = "buffered"',
         "nobody waits for a round there, so there is nothing to train on through", WITHOUT),
        (plan.cohort.max_concurrency > 0, f"[cohort] max_concurrency = {plan.cohort.max_concurrency}",
         "who waits for a place is asked in the middle of a round, and here a round's asks are sent ahead of it",
         "leave [cohort] max_concurrency out"),
        (plan.local.partial, "[local] partial = true",
         "how long sending takes is not known while an earlier update is still on its way", "[local] partial = false"),
        (plan.local.steps == "auto", '[local] steps = "auto"',
         "a device's pace is measured from ask to answer, and here an ask waits for the one before it",
         "[local] steps = 20"),
        (plan.uplink.feedback == "ef21", '[uplink] feedback = "ef21"',
         "the next change is made before it is known whether the aggregator's sum holds the last one",
         '[uplink] feedback = "classic"'),
        (plan.secure.enabled, "[secure] enabled = true",
         "masks are agreed on for one round at a time, and here several are under way", WITHOUT),
        (plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"',
         "what a run spends is counted for cohorts drawn anew each round; who trains on takes its last change with it",
         WITHOUT),
    ):  # fmt: skip
        if given:
            yield Refusal(f"{what} with [local] overlap", why, hint)
