"""What the plan's format has and this version does not: such a key must keep its default, and is never ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator

from thinwire.core.all_sections import Sections
from thinwire.core.refusal import Refusal

UNBUILT = {
    "run": ("eval_cohort",),
    "server": ("reduce",),
    "secure": ("enabled", "adversary", "max_corrupt", "max_dropout", "min_survivors", "bits", "support", "rotate",
               "post_quantum"),
    "privacy": ("mode", "clip", "adaptive", "noise_multiplier", "target_epsilon", "delta", "budget"),
}  # fmt: skip
UNBUILT_VALUES = {
    ("run", "evaluate"): "holdout",
}


def unbuilt(plan: Sections) -> Iterator[Refusal]:
    """Keys and values that this version cannot honour."""
    for section, keys in UNBUILT.items():
        given = getattr(plan, section)
        for key in keys:
            default = type(given).model_fields[key].get_default(call_default_factory=True)
            if getattr(given, key) != default:
                yield _refused(section, key, getattr(given, key), default)
    for (section, key), value in UNBUILT_VALUES.items():
        if getattr(getattr(plan, section), key) == value:
            yield _refused(section, key, value, None)


def _refused(section: str, key: str, value: object, default: object) -> Refusal:
    plain = isinstance(default, (str, int, float)) and default != ""
    shown = str(default).lower() if isinstance(default, bool) else json.dumps(default, default=str)
    said = json.dumps(value) if isinstance(value, (str, bool, int, float)) else "..."
    return Refusal(
        f"[{section}] {key} = {said} cannot be honoured",
        "this version of Thinwire does not have it yet",
        f"[{section}] {key} = {shown}" if plain else f"leave [{section}] {key} out, or give another value",
    )
