"""This package holds what all other packages share: types, layout, keys, plan, events, clock and errors.

Its names are imported from their modules on first use: `thinwire runs list` waits for neither numpy nor pydantic.
Invariant: nothing in it imports torch, opens a connection or uses a database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.core.clock import Clock, RealClock, VirtualClock
    from thinwire.core.errors import ThinwireError
    from thinwire.core.layout import Layout, Segment, Tensor
    from thinwire.core.plan import RunPlan
    from thinwire.core.prng import Key, derive
    from thinwire.core.registry import Registry
    from thinwire.core.types import Assignment, Failure, Part, ReplyHeader, State, UpdateId, UpdateOutcome, Vector

__all__ = [
    "Assignment",
    "Clock",
    "Failure",
    "Key",
    "Layout",
    "Part",
    "RealClock",
    "Registry",
    "ReplyHeader",
    "RunPlan",
    "Segment",
    "State",
    "Tensor",
    "ThinwireError",
    "UpdateId",
    "UpdateOutcome",
    "Vector",
    "VirtualClock",
    "derive",
]  # fmt: skip

MODULES = {
    "clock": ("Clock", "RealClock", "VirtualClock"), "errors": ("ThinwireError",),
    "layout": ("Layout", "Segment", "Tensor"), "plan": ("RunPlan",), "prng": ("Key", "derive"),
    "registry": ("Registry",),
    "types": ("Assignment", "Failure", "Part", "ReplyHeader", "State", "UpdateId", "Vector", "UpdateOutcome"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` from its module (PEP 562)."""
    for module, names in MODULES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
