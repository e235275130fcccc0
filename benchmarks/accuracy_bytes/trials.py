"""A trial: one model trained with one chain, learning rate and number of rounds; a seed makes a cell of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.compression.chain import PLAIN
from thinwire.core.plan import RunPlan
from thinwire.reports.sweep_results import TrialSpec
from thinwire.simulation.sweep import plan_of

TASKS = Path(__file__).parent / "tasks"
CLIENTS = 20
PARTICIPATION = 0.2
ALPHA = "dirichlet(0.3)"
NEVER_S = 1e6  # nobody is late, however long this machine is stopped or busy: figures do not depend on its time


@dataclass(frozen=True, order=True)
class Chain:
    """How an update is made small: a codec, and what becomes of what it leaves out. `down`: the model's way back."""

    codec: str
    feedback: str = "classic"
    decay: float = 1.0
    down: str = PLAIN

    @property
    def name(self) -> str:
        """As it is told to people: what is not the default stands behind a comma.

        >>> Chain("topk(0.01) > sign", decay=0.9).name
        'topk(0.01) > sign, decay 0.9'
        """
        said = [self.codec] + [self.feedback] * (self.feedback != "classic")
        said += [f"decay {self.decay:g}"] * (self.decay != 1) + [f"down {self.down}"] * (self.down != PLAIN)
        return ", ".join(said)


FP32, FP16 = Chain(PLAIN), Chain("fp16")


@dataclass(frozen=True)
class Work:
    """What all trials of one model have in common."""

    name: str
    split: str
    steps: int
    batch: int
    clip: float | None = None
    measure_every: int = 1  # rounds; a divisor of 5, or some quarter in rounds.py has no measured one

    @property
    def task(self) -> str:
        return f"{self.name}={TASKS / self.name}.py"


@dataclass(frozen=True)
class Trial:
    """`split`, `participation` and `clients` are the work's own where none is named."""

    work: Work
    chain: Chain
    rate: float
    rounds: int
    split: str = ""
    participation: float = PARTICIPATION
    clients: int = CLIENTS

    def keys(self, seed: int) -> dict[str, Any]:
        """What the plan says; the seed decides the first model, the cut of the data, the draws and the batches.

        No more than that: a key that a later version adds must not make all cells new.
        """
        chain, work = self.chain, self.work
        selected = {"clients": self.participation if self.participation < 1 else "all", "deadline_s": NEVER_S}
        return {
            "run": {
                "task": work.name, "rounds": self.rounds, "seed": seed, "metric": "accuracy",
                "evaluate_every": work.measure_every,
            },
            "cohort": selected | ({"late": "drop"} if chain.feedback == "ef21" else {}),
            "local": {"lr": self.rate, "steps": work.steps, "batch": work.batch, "clip_grad": work.clip},
            "uplink": {"codec": chain.codec, "feedback": chain.feedback, "feedback_decay": chain.decay},
            "downlink": {"codec": chain.down},
        }  # fmt: skip

    def plan(self, seed: int) -> RunPlan:
        """As its cells are made: nobody's weight is capped, as when the first of them were."""
        return plan_of(self.made(seed, ""))

    def made(self, seed: int, task_digest: str) -> TrialSpec:
        return TrialSpec(self.keys(seed), self.clients, self.split or self.work.split, "", task_digest)
