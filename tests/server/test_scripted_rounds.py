"""Whole runs against drawn scripts: what an arrival, a death or a lie may change, and what never."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stories import DEADLINE_S, ROUNDS, Story, drawn, whole_runs
from tests.support.story_laws import a_round_closes_as_soon_as_nobody_can_answer, tell
from thinwire.core import RunPlan


@st.composite
def stories(draw: st.DrawFn) -> Story:
    clients, most = draw(st.sampled_from(["all", 2, 3])), draw(st.sampled_from([0, 0, 0, 1, 2]))
    cohort = {
        "clients": clients,
        "max_concurrency": most,
        "selection": "uniform" if clients == "all" else draw(st.sampled_from(["uniform", "speed", "link"])),
        "wait_for": 2,
        "wait_s": 100.0,
        "min_updates": draw(st.sampled_from([0.5, 1, 1, 2])),
        "over_select": 0.0 if most or clients == "all" else draw(st.sampled_from([0.0, 0.5])),
        "deadline_s": DEADLINE_S,
        "late": draw(st.sampled_from(["aggregate", "drop"])),
        "max_staleness": draw(st.integers(1, 3)),
        "retry_limit": 3,
    }
    run = {"task": "toy", "rounds": ROUNDS, "seed": draw(st.integers(0, 9))}
    local = {"lr": 1.0, "overlap": draw(st.sampled_from([None, None, {"max_delay": 1}, {"max_delay": 2}]))}
    if local["overlap"]:
        cohort["max_concurrency"] = 0  # it is refused with the other
    raw = {"run": run, "cohort": cohort, "local": local, "uplink": {"codec": "identity"}}
    return drawn(draw, RunPlan.from_json(raw))


@settings(whole_runs, max_examples=30)
@given(stories())
def test_whatever_devices_do(story: Story) -> None:
    a_round_closes_as_soon_as_nobody_can_answer(tell(story))
