"""The tables of a plan and their keys: what each means stands beside it and becomes docs/reference/plan.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


class Section(BaseModel):
    """A table of the plan: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Target(Section):
    """Stop as soon as `metric` reaches `value` (loss: at most, others: at least)."""

    metric: str = "accuracy"
    value: float


class RunSection(Section):
    """What is trained, for how long, and how it is measured."""

    task: TaskName = Field(description="the task's name; devices map it to code installed on them")
    algorithm: Literal["fedavg"] = Field(default="fedavg", description="how updates become a step")
    rounds: Count = Field(default=20, description="rounds to make")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of everything that is drawn in public")
    init: str = Field(
        default="", description="the first model: a .safetensors file, run:ID, device; default: made by the task"
    )
    keep: str = Field(default="last,best", description="versions kept when the run ends: last, best, all")
    target: Target | None = Field(default=None, description="stop when a metric reaches a value")
    metric: str = Field(default="loss", description="what `best` goes by; loss is minimised, others are maximised")
    evaluate: Literal["clients", "holdout", "off"] = Field(default="clients", description="where the model is measured")
    evaluate_every: Count = Field(default=1, description="rounds between two evaluations")
    eval_cohort: Literal["asked"] = Field(default="asked", description="who evaluates")
    task_match: Literal["digest", "version", "layout"] = Field(
        default="layout", description="what must be equal between the operator's task and the device's"
    )


class Requires(Section):
    """What a device must have to be asked."""

    memory_gb: NotNegative = 0.0
    mains: bool = False
    unmetered: bool = False


class CohortSection(Section):
    """Who is asked, how long is waited for, and what becomes of the late."""

    clients: Literal["all"] | Count | Annotated[float, Field(gt=0, lt=1)] = Field(
        default="all", description='asked each round: "all", a count, or a fraction of those there'
    )
    wait_for: Count | list[str] = Field(
        default=1, description="devices that must be there before a round opens: a count or names"
    )
    wait_s: NotNegative = Field(
        default=0.0, description="seconds to wait for them before the run fails; 0 waits for ever"
    )
    min_replies: Annotated[float, Field(gt=0)] = Field(
        default=0.5, description="fewest replies that make a step: a share of those asked, or from 1 on a count"
    )
    over_select: NotNegative = Field(
        default=0.0, description="share asked beyond the number wanted; the round closes when enough came"
    )
    deadline_s: Literal["auto"] | Seconds = Field(default="auto", description="seconds a round may take")
    late: Literal["fold", "drop"] = Field(default="fold", description="what becomes of a reply after its round")
    staleness_exponent: NotNegative = Field(default=0.5, description="a late reply counts (1 + staleness)^-exponent")
    max_staleness: Count = Field(default=5, description="versions behind from which a reply is dropped")
    retry_limit: Annotated[int, Field(ge=0)] = Field(
        default=3, description="rounds in a row with too few replies before the run fails"
    )
    mode: Literal["sync", "buffered"] = "sync"
    buffer: Count = 10
    max_concurrency: Annotated[int, Field(ge=0)] = 0
    selection: Literal["uniform", "speed", "link"] = "uniform"
    requires: Requires = Requires()


class Overlap(Section):
    """Delayed averaging: training goes on while updates travel."""

    max_delay: Count = 1


class LocalSection(Section):
    """What a device does between taking a model and giving a change."""

    lr: Positive = Field(description="learning rate on the device")
    steps: Count | Literal["auto"] | None = Field(
        default=None, description="optimizer steps a round; excludes `epochs`"
    )
    epochs: Positive | None = Field(
        default=None, description="passes over the device's data a round; default 1 where no steps are given"
    )
    min_steps: Count = 1
    codec_threads: Annotated[int, Field(ge=0)] = 0
    batch: Count = Field(default=32, description="examples a batch")
    accumulate: Count = Field(default=1, description="batches whose gradients make one step")
    optimizer: Literal["sgd", "adam", "adamw", "task"] = Field(
        default="sgd", description='"task": the task\'s own optimizer()'
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="of sgd")
    weight_decay: NotNegative = 0.0
    schedule: Literal["constant"] = "constant"
    clip_grad: Positive | None = Field(default=None, description="largest L2 norm of a step's gradient")
    prox: NotNegative = Field(default=0.0, description="FedProx's mu")
    buffers: Literal["average", "local", "frozen"] = Field(
        default="average", description="BatchNorm statistics and the like"
    )
    partial: bool = False
    overlap: Overlap | None = None
    durability: Literal["round", "exit"] = Field(default="round", description="when a device makes its state durable")


class Warmup(Section):
    """Milder ratios for the first rounds."""

    rounds: Count
    ratios: list[Share]


class UplinkSection(Section):
    """How an update is made small."""

    codec: str = Field(
        default="topk(0.01) > int8 > zstd", description="a chain of codecs: `thinwire codecs` lists them"
    )
    layers: dict[str, str] = Field(default={}, description='codecs for tensors by name: { "*.bias" = "fp16" }')
    feedback: Literal["classic", "ef21", "none"] = Field(
        default="classic", description="what becomes of what was not sent"
    )
    feedback_decay: Share = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    warmup: Warmup | None = None
    ladder: list[str] = []


class DownlinkSection(Section):
    """How the model travels to the devices."""

    codec: str = "identity"
    feedback: Literal["shadow"] = "shadow"
    full_every: Annotated[int, Field(ge=0)] = 0
    log_rounds: Count = 20


class ServerSection(Section):
    """What the aggregator does with the replies."""

    threads: Annotated[int, Field(ge=0)] = 0
    optimizer: str = Field(default="fedavg", description="how the mean change becomes a step")
    lr: Positive = Field(default=1.0, description="of the server's step")
    reduce: str = Field(default="mean", description="how changes are put together")


class SecureSection(Section):
    """Secure sums: the server sees only the sum."""

    enabled: bool = False
    adversary: Literal["curious", "malicious"] = "curious"
    max_corrupt: Share = 0.1
    max_dropout: Share = 0.1
    min_survivors: Annotated[int, Field(ge=0)] = 0
    bits: Annotated[int, Field(ge=2, le=32)] = 8
    support: Positive = 1.0
    rotate: bool = False
    post_quantum: bool = False


class PrivacySection(Section):
    """Differential privacy."""

    mode: Literal["off", "central", "distributed", "example"] = "off"
    clip: Positive | None = None
    adaptive: bool = False
    noise_multiplier: Positive | None = None
    target_epsilon: Positive | None = None
    delta: Positive = 1e-5
    budget: Positive | None = None
