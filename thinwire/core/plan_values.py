"""This module defines the types of a plan's values, the base class of its tables, and tables that other files share:
those that are values of a key, and `[secure]` and `[privacy]`, which protect clients.

A type bounds what a key accepts, so that a wrong value is refused where the plan is read. `core/plan_schema.py` has the
other tables; the rules on combinations of protection are in `plan_secure_rules` and `plan_privacy_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from thinwire.core.score_histogram import MAX_HISTOGRAMS

MOST = 2**60  # within 64 bits, and its square within a float: an integer of 400 digits is no float
MAX_SECONDS = 10**9  # 31 years: a thread waits for no more than 2**63 ns
MAX_THREADS = 1024
MAX_SPEC = 4096  # letters that are read of a codec
MAX_NAME = 256  # letters; Python compiles a glob of 256 letters within a millisecond
MAX_GLOBS = 1024
ROUNDING = 1e-9  # a share of a count may miss a whole number by a rounding error
Count = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Waiting = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Positive = Annotated[float, Field(gt=0, le=MOST)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Portion = Annotated[float, Field(gt=0, le=1)]
Block = Literal[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]  # values: a power of two
NotNegative = Annotated[float, Field(ge=0, le=MOST)]
MAX_BATCH = 2**20  # examples: a client keeps a whole batch of a stream in memory
MAX_ACCUMULATE = 4096  # batches: a client keeps those of one step in memory
MAX_DELAY = 16  # rounds: a client keeps an update of the model's size for each
Spec = Annotated[str, StringConstraints(max_length=MAX_SPEC)]  # also a path or a name
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]  # of a metric or a device; also a glob of tensors
Quantile = Annotated[str, StringConstraints(pattern=r"^q0?\.[0-9]{1,6}$")]
TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


def rules_by_layer(layers: Any) -> Any:
    """Return `[uplink.layers]` as it is; raise ValueError, before any codec is parsed, for rules that no codec has."""
    if not isinstance(layers, Mapping):
        return layers
    rules = [(str(pattern), str(spec)) for pattern, spec in layers.items()]
    if sum(len(pattern) + len(spec) + len('""=; ') for pattern, spec in rules) > MAX_SPEC:
        raise ValueError(f"its patterns and codecs become one codec, and {MAX_SPEC} letters of one are read")
    if any(spec.partition("(")[0].strip() == "layers" for _, spec in rules):
        raise ValueError("the codec of a rule is a chain: rules by layer stand in one place, [uplink] codec or layers")
    return layers


class Section(BaseModel):
    """A table of the plan: it is frozen, an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True, allow_inf_nan=False)


class Target(Section):
    """Ends the run as soon as `metric` reaches `value` (loss: at most, others: at least)."""

    metric: Name = Field(default="accuracy", description="a metric of the task, or loss")
    value: float = Field(description="where to stop: loss at most, others at least this")

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Return True if the metric is among `metrics` and reaches the value."""
        if self.metric not in metrics:
            return False
        found = metrics[self.metric]
        return found <= self.value if self.metric == "loss" else found >= self.value


class Requires(Section):
    """Sets the equipment that a device needs to be selected."""

    cores: Whole = Field(default=0, description="processor cores that its client may use")
    memory_gb: NotNegative = Field(default=0.0, description="free memory in GiB")
    mains: bool = Field(default=False, description="on mains power")
    unmetered: bool = Field(default=False, description="on a link that is not paid by volume")


class Overlap(Section):
    """Sets overlap (delayed averaging): clients train on while their updates travel."""

    max_delay: Annotated[int, Field(ge=1, le=MAX_DELAY)] = Field(
        default=1, description="rounds that a change may be under way while training goes on"
    )


class Warmup(Section):
    """Sets higher ratios for the first rounds."""

    rounds: Count = Field(description="rounds until the codec's own ratio holds")
    ratios: list[Portion] = Field(min_length=1, description="ratios on the way there")


class SecureSection(Section):
    """Sets secure aggregation: the aggregator sees only the sum of the updates."""

    enabled: bool = Field(default=False, description="sum updates under masks")
    adversary: Literal["curious", "malicious"] = Field(default="curious", description="aggregator that is withstood")
    max_corrupt: Below1 = Field(default=0.1, description="share of the selected clients that may collude with it")
    max_dropout: Below1 = Field(default=0.1, description="share of the selected clients that a round may lose")
    min_survivors: Whole = Field(
        default=0, description="fewest clients in a sum; 0: the threshold, or all but max_dropout if they add noise"
    )
    graph: Literal["auto", "complete", "k-regular"] = Field(
        default="auto", description="which clients share secrets: all, or k neighbours each; auto: by their number"
    )
    bits: Annotated[int, Field(ge=2, le=16)] = Field(default=8, description="of one value before it is masked")
    support: Portion = Field(default=1.0, description="share of the coordinates in a sum, the same for all clients")
    rotate: bool | Block = Field(default=True, description="rotate before rounding, in blocks of so many; true: 65536")
    clip: Literal["auto"] | Positive = Field(
        default="auto", description="largest L2 norm on the grid; auto: from the sums before"
    )
    weight_max: Count = Field(
        default=1,
        description="most examples that a client counts; 1: all clients count the same; above 1 the sums of several "
        "rounds tell how many each client has",
    )
    metrics: dict[Name, Positive] = Field(
        default={},
        description="metrics that are summed under masks, each with its bound: { loss = 10.0 }; of training train/NAME",
    )
    histograms: Annotated[tuple[Name, ...], Field(max_length=MAX_HISTOGRAMS)] = Field(
        default=(), description="histograms of the task's evaluate() that are summed under masks, for AUC and F1"
    )
    post_quantum: bool = Field(default=False, description="keys from X25519 and ML-KEM together")


class PrivacySection(Section):
    """Sets differential privacy: how much a released model may depend on one client, or on one of its records."""

    mode: Literal["off", "central", "distributed", "local", "example"] = Field(
        default="off",
        description="where noise is added: by the aggregator to the sum (central), or by each client: inside secure "
        "aggregation (distributed), to its own update (local), or at each step of its training (example)",
    )
    clip: Positive | None = Field(default=None, description="largest L2 norm of an update (example: of a gradient)")
    records: Count | None = Field(default=None, description="example: a record's chance in a batch is batch / records")
    clipping: Literal["flat", "per-layer"] = Field(
        default="flat", description="clip the whole update (flat), or each of L tensors to clip / sqrt(L) (per-layer)"
    )
    adaptive: bool = Field(default=False, description="clip is the first one, and then follows the median of the norms")
    noise_multiplier: Positive | None = Field(
        default=None, description="standard deviation of the noise, in multiples of clip (local: of 2 clip)"
    )
    target_epsilon: Positive | None = Field(default=None, description="epsilon after the last round: the noise follows")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1e-5,
        description="added to the bound of epsilon; left out: at most 1 / (10 clients), or 1 / (10 records)",
    )
    budget: Positive | None = Field(
        default=None,
        description="largest epsilon of a client over all runs of its population; the run stops before it is passed",
    )
    max_participations: Count | None = Field(
        default=None, description="most rounds of this run in which one client takes part; left out: all rounds"
    )
    sampling_rate: Portion | None = Field(default=None, description="chance of each device a round (Poisson sampling)")
    mechanism: Literal["auto", "skellam", "discrete-gaussian", "tree"] = Field(
        default="auto",
        description="of the noise; auto: discrete-gaussian, skellam where clients add; tree: tree aggregation, DP-FTRL",
    )
    restart_every: Count | None = Field(default=None, description="most rounds of a tree; left out: all rounds")
    min_separation: Count = Field(default=1, description="fewest rounds from one of a client to its next, in a tree")
    population: str = Field(
        default="", max_length=64, description="the clients whose spending is counted together; left out: the task"
    )

    @property
    def noise(self) -> Literal["skellam", "discrete-gaussian"]:
        """Return the distribution of the noise: sums of Skellam noise are Skellam noise, others are not."""
        if self.mechanism == "skellam" or (self.mechanism == "auto" and self.mode == "distributed"):
            return "skellam"
        return "discrete-gaussian"
