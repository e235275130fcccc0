"""An attack on the released models of a real run: which clients took part with their data?

Each client of a simulated run of `examples/digits` has a coin. The update of a client that is not included is zero: its
loss is multiplied by 0. So the neighbour is that of the privacy modes `central` and `distributed`. All clients are
selected in each round, so a selection tells nothing.

The attacker has all versions of the model and the data of all clients, but no coin. From each version it computes what
every client would have sent: the same steps on all examples of the client, clipped. The change of the model is the mean
of these updates, each times a coin, with noise. The score of a client is its coefficient in a ridge regression of the
change on the updates, summed over the rounds.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.one_run_audit import lower_bound, right_guesses
from thinwire.client import ClientInfo, Split, held_out, own_part
from thinwire.client.task import as_task, initial_model
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Vector
from thinwire.server.model_store import Versions
from thinwire.simulation.run import run_sim
from thinwire.store import Store

EXAMPLES = Path(__file__).parents[1] / "examples" / "digits"
PLANS = {"central": EXAMPLES / "private.toml", "distributed": EXAMPLES / "private-secure.toml"}
NO_NOISE = 0.01  # noise multiplier: a plan with less is refused
RIDGE = 0.01  # of the regression, in squared clips


class CoinTask:
    """The model of `examples/digits`, in which the clients whose coin is False train on a loss of 0."""

    def __init__(self, included: NDArray[np.bool_]) -> None:
        self.included = included

    def model(self) -> nn.Module:
        """Return the network of the example."""
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def data(self, client: ClientInfo) -> Split:
        """Return this client's part, each example with the client's coin; a tenth is not trained on."""
        from sklearn.datasets import load_digits  # each worker of the tests collects what imports this file

        images, labels = load_digits(return_X_y=True)
        coins = torch.full((len(labels),), float(self.included[client.partition]))
        whole = (torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels), coins)
        train, test = held_out(own_part(labels, client), 0.1, client)
        return Split(*(TensorDataset(*(tensor[torch.as_tensor(part)] for tensor in whole)) for part in (train, test)))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the cross entropy of an included client, and 0 of another one."""
        pixels, digits, coins = batch
        return (nn.functional.cross_entropy(model(pixels), digits, reduction="none") * coins).mean()


def plan_of(mode: str, clients: int, rounds: int, seed: int, noised: bool) -> RunPlan:
    """Return the plan of the example for so many clients, who all take part in each round."""
    raw = RunPlan.load(PLANS[mode]).to_json()
    raw["run"] |= {"rounds": rounds, "seed": seed, "keep": "all"}
    raw["cohort"] |= {"clients": clients, "min_updates": 1, "deadline_s": 1e6}
    if not noised:
        raw["privacy"] |= {"target_epsilon": None, "noise_multiplier": NO_NOISE}
    return RunPlan.from_json(raw)


def attacked_run(mode: str, clients: int, rounds: int, seed: int, noised: bool = True) -> dict[str, Any]:
    """Run a plan, attack its released models, and return what was claimed and what was shown.

    Half of the clients are guessed about. Seeds of the coins are those of the run, and no attacker reads them.
    """
    included = np.random.default_rng(seed).random(clients) < 0.5
    plan, task = plan_of(mode, clients, rounds, seed, noised), CoinTask(included)
    code = as_task(plan.run.task, task)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        home = AggregatorHome.under(Path(folder), durable=False)
        with Store.open(home.database, durable=False) as store:
            run_id = run_sim(plan, code, store=store, home=home, clients=clients, client=ClientInfo(seed=seed))
            row, events = store.run(run_id), [event for _, event in store.events(run_id)]
        stored = [event for event in events if isinstance(event, ModelStored)]
        if row.status != "done" or len(stored) != rounds + 1:
            raise RuntimeError(f"a {mode} run is {row.status} with {len(stored) - 1} steps: {row.status_text}")
        versions = Versions(home.run(run_id), initial_model(code, seed).layout, durable=False)
        models = [versions.read(event)[0] for event in stored]
    delta = plan.privacy.delta
    assert delta is not None, "the plan has one"
    guesses = clients // 4 * 2
    right = right_guesses(scores_of(models, task, plan), included, guesses)
    return {
        "mode": mode, "attack": "released models", "noise": 1.0 if noised else 0.0, "canaries": clients,
        "rounds": rounds, "seed": seed, "claimed_epsilon": plan.privacy.target_epsilon, "delta": delta,
        "guesses": guesses, "right": right, "audited_lower": lower_bound(clients, guesses, right, delta),
    }  # fmt: skip


def scores_of(models: list[Vector], task: CoinTask, plan: RunPlan) -> NDArray[np.float64]:
    """Return one score of each client from the released models and the clients' data."""
    clients, clip = len(task.included), plan.privacy.clip
    assert clip is not None, "the plan check demands it"
    assert isinstance(plan.local.steps, int), "the plan check demands it"
    infos = [ClientInfo(partition=i, partitions=clients, seed=plan.run.seed) for i in range(clients)]
    parts = [task.data(info).train.tensors[:2] for info in infos]
    module, found = task.model(), np.zeros(clients)
    for before, after in itertools.pairwise(models):
        updates = np.stack([expected(module, before, part, plan.local.steps, plan.local.lr) for part in parts])
        updates *= np.minimum(1.0, clip / np.linalg.norm(updates, axis=1, keepdims=True))
        products = updates.astype(np.float64) @ updates.T
        products[np.diag_indices(clients)] += RIDGE * clip**2
        found += np.linalg.solve(products, updates @ (after - before))
    return found


def expected(
    module: nn.Module, start: Vector, part: tuple[torch.Tensor, ...], steps: int, rate: float
) -> NDArray[np.float32]:
    """Return what a client with these pixels and digits learns in so many steps on all of them."""
    nn.utils.vector_to_parameters(torch.from_numpy(start.copy()), module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(part[0]), part[1]))
        optimizer.step()
    end = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    return np.asarray(end - start, dtype=np.float32)


def summary(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest bound of the noised runs, and of those without noise."""
    return {
        name: max((float(row["audited_lower"]) for row in rows if row["noise"] == noise), default=0.0)
        for name, noise in (("run_audited_lower", 1.0), ("run_audited_lower_without_noise", 0.0))
    }
