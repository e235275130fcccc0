"""This package holds what all other packages share: types, layout, keys, plan, events, clock and errors.

Invariant: nothing in it imports torch, opens a connection or uses a database.
"""

from thinwire.core.clock import Clock, RealClock, VirtualClock
from thinwire.core.errors import ThinwireError
from thinwire.core.layout import Layout, Segment, Tensor
from thinwire.core.plan import RunPlan
from thinwire.core.prng import Key, derive
from thinwire.core.registry import Registry
from thinwire.core.types import Ask, Failure, Part, ReplyHeader, State, UpdateId, Vector, Verdict

__all__ = [
    "Ask", "Clock", "Failure", "Key", "Layout", "Part", "RealClock", "Registry", "ReplyHeader", "RunPlan",
    "Segment", "State", "Tensor", "ThinwireError", "UpdateId", "Vector", "Verdict", "VirtualClock", "derive",
]  # fmt: skip
