"""One thing that a plan cannot be."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.errors import PlanError


@dataclass(frozen=True)
class Refusal:
    """One thing that cannot be, why, and what would do instead."""

    what: str
    why: str
    hint: str

    def error(self) -> PlanError:
        return PlanError(self.what, self.why, self.hint)
