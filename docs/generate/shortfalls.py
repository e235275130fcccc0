"""What a table of chains does not say by itself: where a default falls short, what gets slower, whose rate is at
an edge of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.accuracy_bytes.bound import MARGIN
from benchmarks.accuracy_bytes.selection import FALLBACK
from benchmarks.accuracy_bytes.trials import FP32, Chain
from docs.generate.names import code
from thinwire.aggregation.plan_codecs import feedback_of
from thinwire.core.plan_schema import UplinkSection

Part = Mapping[str, Any]
DEFAULT = Chain(UplinkSection().codec, feedback_of(UplinkSection()))
SECONDS_ON = "10 Mb/s, 20 ms"


def default_here(part: Part) -> str:
    """What the default, and the chain that was fixed in advance, cost on seeds A, where another was decided for."""
    told = []
    for name, chain in (("The default", DEFAULT), ("A hundredth of the bytes", FALLBACK)):
        for row in part["a"]:
            if row["chain"] == chain.name != part["conclusion"]["chain"]:
                mean, bound = (-row["difference"][one] for one in ("mean", "bound"))
                costs = f"costs {mean:.2f} points here" if mean > 0 else f"gains {-mean:.2f} points here"
                told.append(
                    f"**{name}, {code(chain.name)}, {costs}** ({row['seeds']} seeds A; it loses at most "
                    f"{max(bound, 0):.2f}) for {row['ratio']:.1f} times fewer bytes."
                )
    return " ".join(told)


def default_elsewhere(part: Part) -> str:
    """Where one thing differs from the centre and the selected chain or one of these loses more than the margin."""
    chains = dict.fromkeys((part["conclusion"]["chain"], DEFAULT.name, FALLBACK.name))
    return " ".join(filter(None, (_elsewhere(part, chain) for chain in chains)))


def _elsewhere(part: Part, chain: str) -> str:
    found = [
        f"{-row['difference']['mean']:.2f} {_place(row, part)}"
        for row in part["factors"]
        if row["chain"] == chain and row["difference"]["mean"] < -MARGIN
    ]
    if not found:
        return ""
    return (
        f"{code(chain)} loses more than half a point where one thing is otherwise ({part['seeds']['sweep']} "
        f"seeds): {', and '.join(found)}."
    )


def _place(row: Part, part: Part) -> str:
    if row.get("clients", part["clients"]) != part["clients"]:
        return f"with {round(row['clients'] * row['participation'])} of {row['clients']} clients in a round"
    if row["participation"] != part["participation"]:
        return f"with {100 * row['participation']:.0f} % of the clients in a round"
    return f"with the data cut by `{row['split']}`"


def slower(part: Part) -> str:
    """Where the chain that was decided for takes longer to the target than fp32 does, at 10 Mb/s."""
    chosen, found = part["conclusion"]["chain"], part["to_target"]
    if chosen not in found:
        return ""
    (own, plain), link = (found[chosen], found[FP32.name]), SECONDS_ON
    if own["seconds"][link] is None or plain["seconds"][link] is None or own["seconds"][link] <= plain["seconds"][link]:
        return ""
    quicker = ", ".join(
        f"{code(chain)} {seconds:.1f}"
        for chain, one in found.items()
        if (seconds := one["seconds"][link]) is not None and seconds <= plain["seconds"][link]
    )
    return (
        f"At 10 Mb/s {code(chosen)} takes longer than no codec at all, {own['seconds'][link]:.1f} s ({quicker}): it "
        f"needs {own['rounds']:.0f} rounds for what fp32 has after {plain['rounds']:.0f}."
    )


def edge(part: Part) -> str:
    """Which chains have a rate from an end of the grid as their best: another one, not tried, may suit them better."""
    told = []
    for side, rate in (("lower", min(part["grid"])), ("upper", max(part["grid"]))):
        at = [code(chain) for chain, best in part["rates"].items() if best == rate]
        if at:
            told.append(f"{rate:g}, the {side} edge of the grid, is the best rate of {'; '.join(at)}")
    if not told:
        return ""
    return f"{'. '.join(told)}. The grid was not extended, and a rate beyond it might have suited them better."
