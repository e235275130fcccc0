"""What a client keeps whose update a reduction looked at and did not choose."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.small_task import plan_of
from thinwire import simulate
from thinwire.client import ClientInfo, Split

ROUNDS, CLIENTS, FAR = 4, 5, 0  # client FAR moves the other way, so that Krum never chooses it


class Line:
    """A loss that is linear in the weights, so that a client's raw update is the same from every model."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 1, bias=False)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(batch[0]).mean()
        return found

    def data(self, info: ClientInfo) -> Split:
        slopes = torch.arange(1.0, 9.0) + 0.01 * info.partition
        rows = TensorDataset((-100 * slopes if info.partition == FAR else slopes).repeat(4, 1))
        return Split(rows, rows)


def residuals(reduce: str) -> tuple[list[float], list[str]]:
    """Return the residual norms of client FAR, round by round, and what became of its updates."""
    plan = plan_of(
        f'[server]\nreduce = "{reduce}"\n[cohort]\nlate = "drop"', "topk(0.25)", "classic", f"rounds = {ROUNDS}"
    )
    rows = [row for row in simulate(Line(), plan, clients=CLIENTS).client_records() if row["client"] == f"sim-{FAR}"]
    return [row["residual_norm"] for row in rows], [row["outcome"] for row in rows]


def test_an_update_that_krum_did_not_choose_is_not_restored_to_the_residual() -> None:
    """Restored, it would be sent again, and each later update of this client would be larger."""
    chosen, unchosen = residuals("mean"), residuals("krum(1)")
    assert unchosen[1] == ["aggregated"] * ROUNDS
    assert unchosen == chosen and len(set(chosen[0])) > 1
