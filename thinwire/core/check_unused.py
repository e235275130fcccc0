"""Keys that are given where nothing reads them: refused, so that nobody believes that they did something.

A key at its default asks for nothing. What else each key needs, and which check refuses it there, is in the table of
`tests/core/test_unused.py`, in which every key of a plan stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from thinwire.core.all_sections import Sections
from thinwire.core.refusal import Refusal
from thinwire.core.sections import Section

IDENTITY = "identity"


def unused_refusals(plan: Sections) -> Iterator[Refusal]:
    """In the order of the plan's sections."""
    run, cohort, uplink, downlink = plan.run, plan.cohort, plan.uplink, plan.downlink
    unmeasured, uncoded = run.evaluate == "off", {*uplink.codecs, *uplink.layers.values()} == {IDENTITY}
    for section, key, there, where, why, hint in (
        (run, "metric", unmeasured, '[run] evaluate = "off"',
         "nobody measures the model, so no version is the best", '[run] evaluate = "clients"'),
        (run, "evaluate_every", unmeasured, '[run] evaluate = "off"',
         "nobody measures the model, so there is nothing between two evaluations", '[run] evaluate = "clients"'),
        (cohort, "over_select", cohort.mode == "sync" and cohort.clients == "all", 'clients = "all"',
         "all who are there are asked, so nobody is left to be asked in excess", "[cohort] clients = 0.5"),
        (cohort, "staleness_exponent", cohort.mode == "sync" and cohort.late == "drop", 'late = "drop"',
         "a late reply is dropped, so none counts less for being late", '[cohort] late = "fold"'),
        (uplink, "feedback_decay", uncoded, f'codec = "{IDENTITY}"',
         "the whole update is sent, so no residual is left that could decay", "[uplink] codec = 'topk(0.05) > int8'"),
        (downlink, "full_every", not downlink.compressed, f'codec = "{IDENTITY}"',
         "every model travels in full", "[downlink] codec = 'int8'"),
        (downlink, "log_rounds", not downlink.compressed, f'codec = "{IDENTITY}"',
         "every model travels in full, so no changes are kept for devices that are behind",
         "[downlink] codec = 'int8'"),
    ):  # fmt: skip
        if there and (given := getattr(section, key)) != type(section).model_fields[key].default:
            yield Refusal(
                f"[{_name(plan, section)}] {key} = {json.dumps(given)} with {where}", why, f"{hint}, or leave {key} out"
            )
    yield from _kept(plan)


def _kept(plan: Sections) -> Iterator[Refusal]:
    kept = set(plan.run.keep.split(","))
    if kept < {"last", "best"}:
        left_out = min({"last", "best"} - kept)
        yield Refusal(
            f"[run] keep = {plan.run.keep!r} leaves out {left_out!r}",
            "the last version and the best are kept in every run",
            '[run] keep = "last,best", or "all"',
        )


def _name(plan: Sections, section: Section) -> str:
    return next(name for name in Sections.model_fields if getattr(plan, name) is section)
