"""Tell what a secure round of a plan costs a client, for `plan explain`, `plan check` and `task check`.

The numbers are those of reports/secure_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.core.formatting import duration, size

if TYPE_CHECKING:
    from thinwire.core import RunPlan

LATTICE_ROW = ("[uplink] codec", "(lattice)", "", "not used under masks: see [secure] bits, support and rotate")


def uplink_text(plan: RunPlan) -> str:
    """Return what a client sends of its update, in words."""
    if plan.privacy.mode == "distributed":
        return "integers with noise under masks"
    return f"{plan.secure.bits} bits a value under masks"


def print_cost(found: dict[str, Any]) -> None:
    """Print what `round_cost` found."""
    console.line(f"a secure round of {found['selected']} clients, {found['parameters']} parameters; bytes of a client:")
    rows = [
        (phase, size(both["up"]), size(both["down"]) if both["down"] else "the model")
        for phase, both in found["phases"].items()
    ]
    console.table(("phase", "up", "down"), [*rows, ("all", size(found["up_bytes"]), size(found["down_bytes"]))])
    for line in _lines(found):
        console.line(line)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the ratio, the times, the thresholds and the protection as lines for a person."""
    times = ", ".join(f"{duration(value)} at {rate} Mb/s" for rate, value in found["upload_s_at_mbit"].items())
    yield f"uplink      {found['uplink_ratio']:.1f} times fewer bytes than dense float32 ({size(found['dense_bytes'])})"
    yield f"upload      {times}"
    yield f"numbers     {numbers_text(found)}"
    yield f"protection  {found['protection']}"
    yield f"rounding    adds {found['noise']:.2g} times the squared norm of an update; {found['width']} bits a value"


def numbers_text(found: dict[str, Any]) -> str:
    """Return the thresholds in words, with the letters of docs/explain/secure-aggregation.md."""
    return (
        f"of n = {found['selected']} clients, A = {found['corrupt']} may be corrupt and D = {found['dropout']} may "
        f"leave; t = {found['threshold']} reveal a secret; a sum has at least {found['least']}"
    )
