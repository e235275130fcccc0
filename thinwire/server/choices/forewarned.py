"""What a plan comes to with the devices that are there, where that may not be what was meant: said, never refused."""

from __future__ import annotations

from thinwire.core.plan import RunPlan


def notes(plan: RunPlan, able: int) -> list[str]:
    """Sentences for whoever starts a run with so many devices that can take part.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[cohort]\\nmode="buffered"\\nbuffer=4')
    >>> notes(plan, 3)
    ['[cohort] buffer = 4 is more than the 3 devices that are there: each buffer closes with what all of them sent']
    >>> notes(plan, 9)
    []
    """
    cohort = plan.cohort
    if cohort.mode != "buffered":
        return []
    at_work = min(able, cohort.max_concurrency or able)
    behind = at_work // cohort.buffer  # buffers that fill while one device works, where all are as quick
    if able < cohort.buffer:
        there = "device that is" if able == 1 else f"{able} devices that are"
        said = f"is more than the {there} there: each buffer closes with what all of them sent"
        return [f"[cohort] buffer = {cohort.buffer} {said}"]
    if behind > cohort.max_staleness:
        said = f"with {at_work} devices at work and [cohort] buffer = {cohort.buffer} most answers are about {behind} "
        said += f"versions behind, and [cohort] max_staleness = {cohort.max_staleness} drops them: a larger buffer, or "
        return [said + f"max_concurrency = {cohort.buffer * cohort.max_staleness}"]
    if cohort.buffer < at_work == able <= 2 * cohort.buffer:
        said = f"all {able} devices are at work at once and [cohort] buffer = {cohort.buffer}: quick ones train again "
        said += "from a version that they have just trained from, which costs accuracy where data differ; with "
        return [said + f"max_concurrency = {cohort.buffer} they take turns"]
    return []
