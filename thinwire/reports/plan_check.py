"""Check a plan as a person types it: every problem at its key, the plan without its defaults, and as TOML.

The checks are those of `thinwire plan check`, without a task's code: values, keys that contradict each other, the
numbers of a secure round. A plan from the API may in addition name no code and no file that `aggregator.toml` does not
allow. Such names are found first, and nothing is imported for them.

Nothing is written, and nothing is kept.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from thinwire.core.errors import CodecError, PlanError
from thinwire.core.layout import Layout
from thinwire.core.plan import Problem, RunPlan, require_small, wrong_values
from thinwire.core.plan_names import installed, refused_names
from thinwire.core.plan_text import plan_keys, sparse, toml_text

MAX_DOTS = 200  # in a key: the time in which Python reads one rises with their square
MAX_TEXT = 48 * 1024  # characters of a plan; the longest of our examples has 700
_KEY = re.compile(r"\[(\w+)(?:\.\w+)?\] (\w+)")


@dataclass(frozen=True)
class PlanCheck:
    """Holds what was found of a plan; `plan` is None if a value is not valid, `given` are the keys not at a default."""

    plan: RunPlan | None
    given: Mapping[str, Mapping[str, Any]]
    toml: str
    problems: Sequence[Problem]

    @property
    def ok(self) -> bool:
        """Return True if the plan can run."""
        return not self.problems


def check_text(text: str, allow: Sequence[str], layout: Layout | None = None) -> PlanCheck:
    """Check a plan in TOML; its text stays as it is."""
    if len(text) > MAX_TEXT:
        why = f"at most {MAX_TEXT} characters are read"
        return PlanCheck(None, {}, text, [Problem((), f"the plan has {len(text)} characters", why, "a shorter one")])
    if any(part.count(".") > MAX_DOTS for part in re.split("[=\n]", text)):
        why = f"at most {MAX_DOTS} are read in a key or a value"
        return PlanCheck(None, {}, text, [Problem((), "a line of the plan has too many dots", why, "a shorter one")])
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problem = Problem((), "the plan is not TOML", str(error), 'a line reads: key = "value"')
        return PlanCheck(None, {}, text, [problem])
    return check_values(raw, allow, layout, text)


def check_values(
    raw: Mapping[str, Any], allow: Sequence[str], layout: Layout | None = None, text: str | None = None
) -> PlanCheck:
    """Check a plan given as values; `layout` is that of its task's model, if it is known."""
    try:
        require_small(raw, "the plan")
    except PlanError as error:  # nothing of it is written again: that would take as long
        return PlanCheck(None, {}, text or "", [Problem((), error.what, error.why, error.hint)])
    written = toml_text(_tables(raw)) if text is None else text
    try:
        plan = RunPlan.from_json(raw)
    except PlanError as error:
        wrong = error.__cause__
        single = [Problem((), error.what, error.why, error.hint)]
        found = wrong_values(wrong) if isinstance(wrong, ValidationError) else single
        return PlanCheck(None, _tables(raw), written, found)
    given = sparse(plan.to_json())
    problems = problems_of(plan, allow, layout)
    return PlanCheck(plan, given, toml_text(given) if text is None else text, problems)


def problems_of(plan: RunPlan, allow: Sequence[str], layout: Layout | None = None) -> list[Problem]:
    """Return everything that keeps a plan of the API from running; none if it can run."""
    from thinwire.aggregation import codecs
    from thinwire.aggregation.plan_codecs import require_rules
    from thinwire.reports.secure_cost import thresholds

    if refused := refused_names(plan, codecs.own_names(), allow, installed()):
        return refused  # before the check, which would import what is named
    found = [Problem(_place(one.what, one.hint), one.what, one.why, one.hint) for one in plan.check(codecs)]
    if found:
        return found
    try:
        if plan.secure.enabled and isinstance(plan.cohort.clients, int):
            thresholds(plan, None)
        if layout is not None:
            require_rules(plan, layout)
    except PlanError as error:
        place = ("uplink", "layers") if isinstance(error, CodecError) else _place(error.what, error.hint)
        return [Problem(place, error.what, error.why, error.hint)]
    return []


_SCHEMA = {(section, name) for section, name, _ in plan_keys()}


def _place(*texts: str) -> tuple[str, ...]:
    """Return the first key of a plan that one of the texts names; () if none does.

    >>> _place("dgc in a ladder", "[uplink] codec = the topk chain")
    ('uplink', 'codec')
    """
    for text in texts:
        for section, key in _KEY.findall(text):
            if (section, key) in _SCHEMA:
                return section, key
        if found := re.search(r"\[(\w+)\.(\w+)\]", text):
            return found[1], found[2]
    return ()


def _tables(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables among values that are no valid plan."""
    return {str(name): dict(table) for name, table in raw.items() if isinstance(table, Mapping)}
