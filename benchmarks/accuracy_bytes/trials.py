"""A trial: one model trained with one chain, learning rate and number of rounds; a seed makes a cell of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.core.plan import RunPlan
from thinwire.store.cells import Made

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
    down: str = "identity"

    @property
    def name(self) -> str:
        """As it is told to people: what is not the default stands behind a comma.

        >>> Chain("topk(0.01) > sign", decay=0.9).name
        'topk(0.01) > sign, decay 0.9'
        """
        said = [self.codec] + [self.feedback] * (self.feedback != "classic")
        said += [f"decay {self.decay:g}"] * (self.decay != 1) + [f"down {self.down}"] * (self.down != "identity")
        return ", ".join(said)


FP32, FP16 = Chain("identity"), Chain("fp16")


@dataclass(frozen=True)
class Work:
    """What all trials of one model have in common."""

    name: str
    split: str
    steps: int
    batch: int
    clip: float | None = None
    measure_every: int = 1  # rounds

    @property
    def task(self) -> str:
        return f"{self.name}={TASKS / self.name}.py"


@dataclass(frozen=True)
class Trial:
    """`split` and `participation` are the work's own where none is named."""

    work: Work
    chain: Chain
    rate: float
    rounds: int
    split: str = ""
    participation: float = PARTICIPATION

    def plan(self, seed: int) -> RunPlan:
        """The plan of one cell; the seed decides the first model, the cut of the data, the draws and the batches."""
        local = {"lr": self.rate, "steps": self.work.steps, "batch": self.work.batch, "clip_grad": self.work.clip}
        chain = self.chain
        return RunPlan.from_json(
            {
                "run": {
                    "task": self.work.name, "rounds": self.rounds, "seed": seed, "metric": "accuracy",
                    "evaluate_every": self.work.measure_every,
                },
                "cohort": {"clients": self.participation if self.participation < 1 else "all", "deadline_s": NEVER_S}
                | ({"late": "drop"} if chain.feedback == "ef21" else {}),
                "local": local,
                "uplink": {"codec": chain.codec, "feedback": chain.feedback, "feedback_decay": chain.decay},
                "downlink": {"codec": chain.down},
            }
        )  # fmt: skip

    def made(self, seed: int, task_digest: str) -> Made:
        return Made(self.plan(seed).to_json(), CLIENTS, self.split or self.work.split, "", task_digest)
