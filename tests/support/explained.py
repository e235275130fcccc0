"""The explanations of a run's rounds, computed from its rows as they are: what the store keeps must equal them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from thinwire.reports import secure_rounds
from thinwire.store.read_models import PhaseRow, RoundRow, RunRow, UpdateRow
from thinwire.store.round_explanation import RoundExplanation, explain_round


def whys(
    run: RunRow, rounds: Sequence[RoundRow], updates: Iterable[UpdateRow], since: Mapping[int, float | None],
    rtts: Mapping[str, float] | None = None, phases: Iterable[PhaseRow] = (),
) -> list[RoundExplanation]:  # fmt: skip
    """Return the explanations of the closed rounds among these, in order.

    `updates` are all rows that were assigned or aggregated in the rounds. `since` is when each round began to accept
    replies (`turns`). `rtts` are seconds by device. `phases` are the closed phases of secure rounds.
    """
    assignments, earlier = defaultdict[int, list[UpdateRow]](list), defaultdict[int, list[UpdateRow]](list)
    for one in updates:
        assignments[one.round].append(one)
        if one.aggregated_round not in (None, one.round):
            earlier[one.aggregated_round or 0].append(one)
    simulated, secure = run.source == "sim", secure_rounds.is_secure(run)
    closed_phases = defaultdict[int, list[PhaseRow]](list)
    for row in phases:
        closed_phases[row.round].append(row)
    return [
        explain_round(
            one, assignments[one.round], earlier[one.round], since[one.round], simulated=simulated, rtts=rtts,
            phases=closed_phases[one.round] if secure else None,
        )
        for one in rounds if one.reason
    ]  # fmt: skip
