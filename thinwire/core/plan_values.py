"""This module defines the types of a plan's values, and the base class of its tables.

A type bounds what a key accepts, so that a wrong value is refused where the plan is read.
"""

from __future__ import annotations

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
