"""This module defines the tables of a plan and their keys; it checks each value alone, not combinations of keys.

The descriptions of the keys become docs/reference/plan.md. `Sections` holds all tables; core/plan.py reads it.

Invariant: no key is ignored. Its type has the values that this version supports, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from thinwire.core.errors import CodecError
from thinwire.core.plan_values import (
    MAX_ACCUMULATE,
    MAX_BATCH,
    MAX_GLOBS,
    MOST,
    ROUNDING,
    Below1,
    Count,
    Name,
    NotNegative,
    Overlap,
    Portion,
    Positive,
    PrivacySection,
    Quantile,
    Requires,
    Seconds,
    Section,
    SecureSection,
    Share,
    Spec,
    Target,
    TaskName,
    Threads,
    Waiting,
    Warmup,
    Whole,
    rules_by_layer,
)

UNKNOWN_NAME = "unknown_name"  # pydantic's type of an error that holds what, why and hint of a CodecError


def _known(require: Callable[[Any, str], object]) -> AfterValidator:
    """Return a validator of a name that a registry has; it checks only where the plan is read with a `CodecBook`."""

    def check(name: str, read_with: ValidationInfo) -> str:
        try:
            if read_with.context is not None:
                require(read_with.context, name)
        except CodecError as error:
            said = {"what": error.what, "why": error.why, "hint": error.hint}
            raise PydanticCustomError(UNKNOWN_NAME, "{what}", said) from error
        return name

    return AfterValidator(check)


Codec = Annotated[Spec, _known(lambda book, spec: book.parse(spec))]


class RunSection(Section):
    """Sets the task, the algorithm, the number of rounds, and how the model is evaluated."""

    task: TaskName = Field(description="the task's name; devices map it to code installed on them")
    algorithm: Literal["fedavg", "scaffold", "feddyn"] = Field(
        default="fedavg", description="how updates become a step, and what devices remember between rounds"
    )
    alpha: Positive = Field(default=0.1, description="of feddyn: how strongly a device is held to the round's model")
    rounds: Count = Field(default=20, description="rounds to make")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of everything that is drawn in public")
    priority: Annotated[float, Field(ge=0.01, le=100)] = Field(
        default=1.0, description="share of the devices' time, beside other runs that use them"
    )
    init: Spec = Field(
        default="",
        description="the first model: a .safetensors file, `run:ID`, or `device`: a device makes it. Empty: the task "
        "makes it where the run is started; the dashboard lets a device do so",
    )
    keep: Name = Field(default="last,best", description="versions kept when the run ends: last,best or all")
    target: Target | None = Field(default=None, description="stop when a metric reaches a value")
    patience: Count | None = Field(default=None, description="stop after so many evaluated models without a new best")
    metric: Name = Field(default="loss", description="what `best` goes by; loss is minimised, others are maximised")
    evaluate: Literal["clients", "holdout", "off"] = Field(
        default="clients", description="where the model is evaluated; holdout: by the operator, on data of its own"
    )
    evaluate_wait_s: Waiting = Field(
        default=60.0,
        description="of holdout: seconds that a round of a run with target or patience, and the run's end, wait for it",
    )
    evaluate_every: Count = Field(default=1, description="rounds between two evaluations")
    fraction_evaluate: Portion = Field(
        default=1.0, description="share of the selected clients that evaluate in a round, drawn from the seed"
    )
    eval_cohort: Literal["selected"] = Field(default="selected", description="who evaluates")
    task_match: Literal["digest", "version", "layout"] = Field(
        default="layout", description="what must be equal between the operator's task and the device's"
    )


class CohortSection(Section):
    """Sets how many clients are selected, how long a round waits for them, and how late replies count."""

    clients: Literal["all"] | Count | Annotated[float, Field(gt=0, lt=1)] = Field(
        default="all", description='selected each round: "all", a count, or a fraction of those there'
    )
    wait_for: Count | list[Name] = Field(
        default=1, description="devices that must be there before a round opens: a count or names"
    )
    wait_s: Waiting = Field(default=0.0, description="seconds to wait for them before the run fails; 0 waits for ever")
    min_updates: Positive = Field(
        default=0.5, description="fewest updates that make a step: a share of those selected, or from 1 on a count"
    )
    over_select: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0, description="share selected beyond the target; the round closes when enough updates arrived"
    )
    deadline_s: Literal["auto"] | Seconds = Field(
        default="auto", description="seconds a round may take; auto: by the links and speed of its devices"
    )
    late: Literal["aggregate", "drop"] = Field(default="aggregate", description="outcome of a reply after its round")
    staleness_exponent: NotNegative = Field(default=0.5, description="a late reply counts (1 + staleness)^-exponent")
    max_staleness: Count = Field(default=5, description="versions that a reply may be behind; one of more is dropped")
    retry_limit: Whole = Field(
        default=3,
        description=(
            "rounds in a row without a step before the run fails; further assignments of one device for a model"
        ),
    )
    mode: Literal["sync", "buffered"] = Field(
        default="sync",
        description="rounds, or a buffer that fills as replies come while all devices are at work (FedBuff)",
    )
    buffer: Count = Field(
        default=10, description='replies that fill the buffer of mode = "buffered", at most one a device'
    )
    max_concurrency: Whole = Field(
        default=0,
        description="devices that may be at work at once, the others when a concurrency slot is free; 0: no limit",
    )
    selection: Literal["uniform", "speed", "link"] = Field(
        default="uniform",
        description=(
            "how a round's devices are sampled: with equal weights, or fast ones more often, by a step or by link"
        ),
    )
    max_weight: Literal["none"] | Annotated[float, Field(ge=1, le=MOST)] = Field(
        default=10.0,
        description="most that one client counts, in medians of its round, from three clients on, in the model and in "
        "what `best` and `target` go by; none: no limit",
    )
    requires: Requires = Field(default=Requires(), description="what a device must have to be selected")

    def target_updates(self, online: int) -> int:
        """Return from how many of `online` devices a round wants replies."""
        if self.clients == "all":
            return online
        if isinstance(self.clients, float):
            return max(1, math.ceil(self.clients * online - ROUNDING))
        return min(self.clients, online)

    def over_selected(self, target: int, online: int) -> int:
        """Return how many of `online` devices a round selects to get `target` replies."""
        excess = 0.0 if self.clients == "all" else self.over_select
        return min(online, math.ceil(target * (1 + excess)))


class LearningRate(Section):
    """Sets a learning rate and its schedule, of the clients or of the server."""

    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how lr falls over the run, step by step"
    )
    schedule_rounds: Count | None = Field(
        default=None, description="rounds over which the schedule runs; left out: [run] rounds"
    )
    lr_warmup: Below1 = Field(default=0.0, description="share of the run over which lr rises to its value")
    lr_end: Share = Field(default=0.0, description="share of lr at the end of a linear or cosine schedule")

    @property
    def moves(self) -> bool:
        """Return True if the learning rate changes during the run."""
        return self.schedule != "constant" or self.lr_warmup > 0


class LocalSection(LearningRate):
    """Sets how a client trains between receiving a model and sending an update."""

    lr: Positive = Field(description="learning rate on the device")
    steps: Count | Literal["auto"] | None = Field(
        default=None,
        description="optimizer steps a round; auto: what a device's speed allows, up to a pass; excludes `epochs`",
    )
    epochs: Positive | None = Field(
        default=None, description="passes over the device's data a round; default 1 where no steps are given"
    )
    min_steps: Count = Field(
        default=1, description='steps made even where time is short, with partial work or steps = "auto"'
    )
    codec_threads: Threads = Field(
        default=0, description="threads that encode and decode on a device; 0: as many as cores"
    )
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = Field(default=32, description="examples a batch")
    accumulate: Annotated[int, Field(ge=1, le=MAX_ACCUMULATE)] = Field(
        default=1, description="batches whose gradients make one step"
    )
    optimizer: Literal["sgd", "adam", "adamw", "task"] = Field(
        default="sgd", description='"task": the task\'s own optimizer()'
    )
    momentum: Below1 = Field(default=0.0, description="of sgd")
    weight_decay: NotNegative = Field(default=0.0, description="of the optimizer")
    clip_grad: Positive | None = Field(
        default=None, description="largest L2 norm of a step's gradient, before prox and control variates"
    )
    prox: NotNegative = Field(default=0.0, description="FedProx's mu")
    buffers: Literal["average", "local", "frozen"] = Field(
        default="average", description="BatchNorm statistics and the like"
    )
    personal_layers: Annotated[tuple[Name, ...], Field(max_length=MAX_GLOBS)] = Field(
        default=(), description='globs of tensors that stay on each client: ["head.*"] (FedPer), ["*bn*"] (FedBN)'
    )
    partial: bool = Field(
        default=False, description="train no longer than leaves time to encode and send before the deadline"
    )
    overlap: Overlap | None = Field(default=None, description="delayed averaging: train on while updates travel")
    durability: Literal["round", "exit"] = Field(
        default="round",
        description="when a device's state is durable; exit: a kill costs its residual and its personal values",
    )

    @property
    def delay(self) -> int:
        """Return for how many rounds an update may travel while training goes on; 0: a client waits for its outcome."""
        return self.overlap.max_delay if self.overlap else 0


IDENTITY = "identity"  # the codec that sends the values as they are
DGC = "dgc"
DGC_MOMENTUM = 0.9
DGC_RATIOS = (0.25, 0.0625, 0.015625, 0.004)  # Lin et al. 2018, section 3.3
MAX_RUNGS = 32  # of a codec ladder: a check encodes with each, 8 ms, and plans come from others


class UplinkSection(Section):
    """Sets how updates are compressed.

    The default codec, `eden(1)` without feedback, cost less than half a point of accuracy wherever it was measured
    (docs/how/which-codec.md).
    """

    codec: Codec = Field(default="eden(1)", description="a chain of codecs: `thinwire codecs` lists them")
    layers: Annotated[dict[Name, Codec], BeforeValidator(rules_by_layer)] = Field(
        default={}, description='codecs for tensors by name: { "*.bias" = "fp16" }'
    )
    feedback: Literal["auto", "classic", "ef21", "none"] = Field(
        default="auto",
        description='error feedback; "auto" is "none" if all codecs of the plan are unbiased, else "classic"',
    )
    feedback_decay: Share = Field(
        default=1.0, description="what is left of the residual for each round since the last update"
    )
    momentum: Below1 = Field(default=0.0, description="momentum correction within the feedback, for [local] steps = 1")
    warmup: Warmup | None = Field(default=None, description="larger ratios for the first rounds")
    ladder: list[Codec] = Field(
        default=[],
        max_length=MAX_RUNGS,
        description="codecs, least compressed first: each device gets the first that its link carries in time",
    )

    @property
    def codecs(self) -> list[str]:
        """Return the codecs that a client may be assigned, least compressed first: the ladder's rungs, or the one
        codec.
        """
        return self.ladder or [self.codec]

    @property
    def dgc(self) -> bool:
        """Return True if the codec is the macro of deep gradient compression: top-k with all its four parts."""
        return self.codec.partition("(")[0].strip() == DGC

    @property
    def velocity(self) -> float:
        """Return the momentum of the error feedback; dgc has the paper's momentum by default."""
        return self.momentum or (DGC_MOMENTUM if self.dgc else 0.0)

    @property
    def warming(self) -> Warmup | None:
        """Return the warm-up; dgc has by default the paper's ratios, one round each."""
        return self.warmup or (Warmup(rounds=len(DGC_RATIOS), ratios=list(DGC_RATIOS)) if self.dgc else None)


class DownlinkSection(Section):
    """Sets how the model is compressed on its way to the clients."""

    codec: Codec = Field(default=IDENTITY, description="a chain of codecs for the model's changes")
    feedback: Literal["replica"] = Field(default="replica", description="the server keeps the devices' model")
    full_every: Whole = Field(default=0, description="rounds between two full models; 0: never")
    log_rounds: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=20, description="rounds that a device may be behind and still get changes only"
    )

    @property
    def compressed(self) -> bool:
        """Return True if clients receive encoded differences of a replica, False if they receive the model itself."""
        return self.codec.strip() != IDENTITY


class ServerSection(LearningRate):
    """Sets how the aggregator turns updates into a new model."""

    threads: Threads = Field(default=0, description="threads that fold; 0: one")
    optimizer: Annotated[Spec, _known(lambda book, name: book.require_optimizer(ServerSection(optimizer=name)))] = (
        Field(default="fedavg", description="fedavg, fedavgm, fedadam, fedyogi, fedadagrad, MODULE:CLASS")
    )
    lr: Positive = Field(default=1.0, description="of the server's step")
    momentum: Below1 | None = Field(default=None, description="of fedavgm, fedadam, fedyogi (0.9) and fedadagrad (0)")
    beta2: Below1 | None = Field(default=None, description="of fedadam and fedyogi: how long squares are kept; 0.99")
    tau: Positive | None = Field(default=None, description="of fedadam, fedyogi, fedadagrad: smallest divisor; 0.001")
    reduce: Annotated[Spec, _known(lambda book, spec: spec == "mean" or book.reduction_of(spec))] = Field(
        default="mean",
        description="mean, or with all updates counting alike median, trimmed(b), krum(f), multi-krum(f, m), "
        "geometric-median, clipped(tau), MODULE:CLASS",
    )
    max_norm: Positive | Quantile | None = Field(
        default=None,
        description="largest L2 norm of an update (divided by its normaliser); q0.9: that quantile of the norms of the "
        "last ten rounds, in the first round of its own",
    )


class Sections(Section):
    """Holds all tables of a plan; only `[run] task` and `[local] lr` have no default."""

    plan_version: Literal[1] = 1
    run: RunSection
    cohort: CohortSection = CohortSection.model_construct()
    local: LocalSection
    uplink: UplinkSection = UplinkSection.model_construct()
    downlink: DownlinkSection = DownlinkSection.model_construct()
    server: ServerSection = ServerSection.model_construct()
    secure: SecureSection = SecureSection.model_construct()
    privacy: PrivacySection = PrivacySection.model_construct()

    @property
    def is_protected(self) -> bool:
        """Return True if a reply may tell nothing of its client's data but the update: under masks, or with privacy."""
        return self.secure.enabled or self.privacy.mode != "off"
