"""The plan: everything about a run that a person decides, read from TOML, checked, and stored resolved.

Two lines make a valid plan, `[run] task` and `[local] lr`; the rest has defaults. What the keys mean stands beside
them and becomes docs/reference/plan.md. What cannot hold together is refused by `core/check.py`.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from thinwire.core.check import CodecBook, DeviceTimes, Refusal, refusals
from thinwire.core.errors import PlanError

PLAN_VERSION = 1

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
    algorithm: Literal["fedavg"] = Field("fedavg", description="how updates become a step")
    rounds: Count = Field(20, description="rounds to make")
    seed: int = Field(0, ge=0, lt=2**63, description="of everything that is drawn in public")
    init: str = Field("", description="the first model: a .safetensors file, run:ID, device; default: made by the task")
    keep: str = Field("last,best", description="versions kept when the run ends: last, best, all")
    target: Target | None = Field(None, description="stop when a metric reaches a value")
    metric: str = Field("loss", description="what `best` goes by; loss is minimised, others are maximised")
    evaluate: Literal["clients", "holdout", "off"] = Field("clients", description="where the model is measured")
    evaluate_every: Count = Field(1, description="rounds between two evaluations")
    eval_cohort: Literal["asked"] = Field("asked", description="who evaluates")
    task_match: Literal["digest", "version", "layout"] = Field(
        "layout", description="what must be equal between the operator's task and the device's"
    )


class Requires(Section):
    """What a device must have to be asked."""

    memory_gb: NotNegative = 0.0
    mains: bool = False
    unmetered: bool = False


class CohortSection(Section):
    """Who is asked, how long is waited for, and what becomes of the late."""

    clients: Literal["all"] | Count | Annotated[float, Field(gt=0, lt=1)] = Field(
        "all", description='asked each round: "all", a count, or a fraction of those there'
    )
    wait_for: Count | list[str] = Field(1, description="devices that must be there before a round opens: a count or names")
    wait_s: NotNegative = Field(0.0, description="seconds to wait for them before the run fails; 0 waits for ever")
    min_replies: Annotated[float, Field(gt=0)] = Field(
        0.5, description="fewest replies that make a step: a share of those asked, or from 1 on a count"
    )
    over_select: NotNegative = Field(0.0, description="share asked beyond the number wanted; the round closes when enough came")
    deadline_s: Literal["auto"] | Seconds = Field("auto", description="seconds a round may take")
    late: Literal["fold", "drop"] = Field("fold", description="what becomes of a reply after its round")
    staleness_exponent: NotNegative = Field(0.5, description="a late reply counts (1 + staleness)^-exponent")
    max_staleness: Count = Field(5, description="versions behind from which a reply is dropped")
    retry_limit: Annotated[int, Field(ge=0)] = Field(3, description="rounds in a row with too few replies before the run fails")
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
    steps: Count | Literal["auto"] | None = Field(None, description="optimizer steps a round; excludes `epochs`")
    epochs: Positive | None = Field(None, description="passes over the device's data a round; default 1 where no steps are given")
    min_steps: Count = 1
    codec_threads: Annotated[int, Field(ge=0)] = 0
    batch: Count = Field(32, description="examples a batch")
    accumulate: Count = Field(1, description="batches whose gradients make one step")
    optimizer: Literal["sgd", "adam", "adamw", "task"] = Field("sgd", description='"task": the task\'s own optimizer()')
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of sgd")
    weight_decay: NotNegative = 0.0
    schedule: Literal["constant"] = "constant"
    clip_grad: Positive | None = Field(None, description="largest L2 norm of a step's gradient")
    prox: NotNegative = Field(0.0, description="FedProx's mu")
    buffers: Literal["average", "local", "frozen"] = Field("average", description="BatchNorm statistics and the like")
    partial: bool = False
    overlap: Overlap | None = None
    durability: Literal["round", "exit"] = Field("round", description="when a device makes its state durable")


class Warmup(Section):
    """Milder ratios for the first rounds."""

    rounds: Count
    ratios: list[Share]


class UplinkSection(Section):
    """How an update is made small."""

    codec: str = Field("topk(0.01) > int8 > zstd", description="a chain of codecs: `thinwire codecs` lists them")
    layers: dict[str, str] = Field({}, description='codecs for tensors by name: { "*.bias" = "fp16" }')
    feedback: Literal["classic", "ef21", "none"] = Field("classic", description="what becomes of what was not sent")
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
    optimizer: str = Field("fedavg", description="how the mean change becomes a step")
    lr: Positive = Field(1.0, description="of the server's step")
    reduce: str = Field("mean", description="how changes are put together")


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


class RunPlan(Section):
    """A whole plan. `resolved` fills what depends on other keys; `digest` binds it.

    >>> plan = RunPlan.parse('[run]\\ntask = "digits"\\n[local]\\nlr = 0.5')
    >>> plan.run.rounds, plan.uplink.codec
    (20, 'topk(0.01) > int8 > zstd')
    """

    plan_version: Literal[1] = PLAN_VERSION
    run: RunSection
    cohort: CohortSection = CohortSection()
    local: LocalSection
    uplink: UplinkSection = UplinkSection()
    downlink: DownlinkSection = DownlinkSection()
    server: ServerSection = ServerSection()
    secure: SecureSection = SecureSection()
    privacy: PrivacySection = PrivacySection()

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, str] | None = None) -> RunPlan:
        """Read a plan's file; `overrides` are `--set section.key=value` in TOML's own notation."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}", why=str(error), hint="thinwire init DIR writes one") from error
        return cls.parse(text, source=str(path), overrides=overrides)

    @classmethod
    def parse(cls, text: str, source: str = "plan", overrides: Mapping[str, str] | None = None) -> RunPlan:
        """Read a plan from TOML; `PlanError` names every wrong key and value at once."""
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"{source} is not TOML", why=str(error), hint='a line reads: key = "value"') from error
        for place, value in (overrides or {}).items():
            _override(raw, place, value)
        return cls.from_json(raw, source)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "plan") -> RunPlan:
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise _explained(error, source) from error

    def to_json(self) -> dict[str, Any]:
        """All keys with their values, defaults included: what is stored and sent."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the canonical JSON of the resolved plan."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def check(self, codecs: CodecBook, measured: Mapping[str, DeviceTimes] | None = None) -> list[Refusal]:
        """Everything in this plan that cannot hold together, with the reason; empty when it can run."""
        return refusals(self, codecs, measured or {})


def _override(raw: dict[str, Any], place: str, value: str) -> None:
    section, _, key = place.partition(".")
    if not key:
        raise PlanError(f"--set {place}={value} names no key", hint="--set section.key=value, as in --set local.lr=0.1")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word is a string
    table = raw.setdefault(section, {})
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = parsed


def _explained(error: ValidationError, source: str) -> PlanError:
    """Pydantic's findings in our three lines: every one is named, the first decides the hint."""
    from thinwire.core.explain import explain

    found = [explain(RunPlan, details) for details in error.errors()]
    what = f"{source}: " + "; ".join(w for w, _, _ in found)
    return PlanError(what, why="; ".join(dict.fromkeys(y for _, y, _ in found if y)), hint=next((h for _, _, h in found if h), ""))
