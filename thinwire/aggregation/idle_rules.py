"""Rules by layer that decide nothing, looked for once the model is known.

A misspelt pattern would be followed by nobody: its tensors would go the way of all others, and no one would see it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from thinwire.aggregation.layers import Layers
from thinwire.aggregation.parse import parse
from thinwire.aggregation.rungs import rungs
from thinwire.core.errors import CodecError
from thinwire.core.layout import Layout

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

NAMED = 12  # tensors in a sentence


def require_rules(plan: RunPlan, layout: Layout) -> None:
    """`CodecError` where a rule of the plan is for none of what travels in `layout`, or for tensors of rules before it.

    The last one, `*`, is for what is left, and that may be nothing.
    """
    for place, spec in _specs(plan):
        codec = parse(spec)
        if isinstance(codec, Layers):
            pieces = (piece for segment in layout.segments for piece in segment.slices)
            _require(place, codec, list(dict.fromkeys(piece.tensor.name for piece in pieces)))


def _specs(plan: RunPlan) -> Iterator[tuple[str, str]]:
    for spec in rungs(plan.uplink):
        yield "[uplink]", spec
    yield "[downlink]", plan.downlink.codec


def _require(place: str, codec: Layers, names: list[str]) -> None:
    left = names
    for rule in codec.rules[:-1]:
        mine = [name for name in left if fnmatchcase(name, rule.pattern)]
        left = [name for name in left if name not in mine]
        if mine:
            continue
        taken = [name for name in names if fnmatchcase(name, rule.pattern)]
        near = difflib.get_close_matches(rule.pattern, names, n=1, cutoff=0.5)
        why = f"no trained tensor of this model is called like that; there are {_listed(names)}"
        hint = f"a pattern for {near[0]}, or leave the rule out" if near else "leave the rule out"
        if taken:
            why, hint = f"rules before it decide for {_listed(taken)}", "put it before them, or leave it out"
        raise CodecError(f"{place} the rule {rule.spec} is for nothing", why=why, hint=hint)


def _listed(names: list[str]) -> str:
    """So many names as a person reads.

    >>> _listed(["a", "b"]), _listed([])
    ('a, b', 'none')
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"
