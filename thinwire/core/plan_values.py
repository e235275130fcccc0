"""This module defines the types of a plan's values, the base class of its tables, and tables that are values of a key.

A type bounds what a key accepts, so that a wrong value is refused where the plan is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Count = Annotated[int, Field(ge=1, le=2**60)]  # within 64 bits: an integer of 400 digits is no float
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Portion = Annotated[float, Field(gt=0, le=1)]
Block = Literal[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]  # values: a power of two
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MAX_BATCH = 2**20  # examples: a client keeps a whole batch of a stream in memory
MAX_ACCUMULATE = 4096  # batches: a client keeps those of one step in memory
MOST_DELAY = 16  # rounds: a client keeps an update of the model's size for each
Spec = Annotated[str, StringConstraints(max_length=4096)]  # no more is read of a codec; also a path or a name
Quantile = Annotated[str, StringConstraints(pattern=r"^q0?\.[0-9]{1,6}$")]
TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


class Section(BaseModel):
    """A table of the plan: it is frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True)


class Target(Section):
    """Ends the run as soon as `metric` reaches `value` (loss: at most, others: at least)."""

    metric: str = Field(default="accuracy", description="a metric of the task, or loss")
    value: float = Field(description="where to stop: loss at most, others at least this")

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Return True if the metric is among `metrics` and reaches the value."""
        if self.metric not in metrics:
            return False
        found = metrics[self.metric]
        return found <= self.value if self.metric == "loss" else found >= self.value


class Requires(Section):
    """Sets the equipment that a device needs to be selected."""

    cores: Annotated[int, Field(ge=0)] = Field(default=0, description="processor cores that its client may use")
    memory_gb: NotNegative = Field(default=0.0, description="free memory in GiB")
    mains: bool = Field(default=False, description="on mains power")
    unmetered: bool = Field(default=False, description="on a link that is not paid by volume")


class Overlap(Section):
    """Sets overlap (delayed averaging): clients train on while their updates travel."""

    max_delay: Annotated[int, Field(ge=1, le=MOST_DELAY)] = Field(
        default=1, description="rounds that a change may be under way while training goes on"
    )


class Warmup(Section):
    """Sets higher ratios for the first rounds."""

    rounds: Count = Field(description="rounds until the codec's own ratio holds")
    ratios: list[Portion] = Field(min_length=1, description="ratios on the way there")
