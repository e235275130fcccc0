"""The plan: everything about a run that a person decides, read from TOML, checked, and stored resolved.

Two lines make a valid plan, `[run] task` and `[local] lr`; the rest has defaults (core/sections.py). What cannot
hold together is refused by core/check.py, which sees it as plain values (core/all_sections.py).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from thinwire.core.all_sections import Sections
from thinwire.core.check import DeviceTimes, refusals
from thinwire.core.check_codecs import CodecBook
from thinwire.core.errors import PlanError
from thinwire.core.explain import either, explain, place_of
from thinwire.core.overrides import Overrides
from thinwire.core.refusal import Refusal

MAX_VALUES = 2**14  # tables, lists and what they hold: judging a wrong one takes 30 us and 1 kB each
UNCOUNTED = (  # by client/compute/evaluate.py; the aggregator knows names alone, not why one is missing
    "a task without metrics() has an accuracy only where loss calls the model once and the batch is (inputs, targets), "
    "with logits (N, C) and N integers below C"
)
COUNT_IT = 'metrics(model, batch) in the task, with {"accuracy": (correct, len(targets))}'


class RunPlan(Sections):
    """A whole plan. `resolved` fills what depends on other keys; `digest` binds it.

    >>> plan = RunPlan.parse('[run]\\ntask = "digits"\\n[local]\\nlr = 0.5')
    >>> plan.run.rounds, plan.uplink.codec
    (20, 'eden(1)')
    """

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, str] | None = None, option: str = "--set") -> RunPlan:
        """Read a plan's file; `overrides` are `--set section.key=value` in TOML's own notation."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"cannot read the plan {path}",
                why=getattr(error, "strerror", None) or str(error),
                hint="thinwire init DIR writes one",
            ) from error
        return cls.parse(text, str(path), overrides, option)

    @classmethod
    def parse(
        cls, text: str, source: str = "plan", overrides: Mapping[str, str] | None = None, option: str = "--set"
    ) -> RunPlan:
        """Read a plan from TOML; `PlanError` names every wrong key and value at once, and `option` where one of its."""
        try:
            raw = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # not only TOML's own: Python reads no number of so many digits
            raise PlanError(f"{source} is not TOML", why=str(error), hint='a line reads: key = "value"') from error
        over = Overrides(overrides or {}, option)
        return cls._valid(over.put(raw), source, over)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "plan") -> RunPlan:
        return cls._valid(raw, source, Overrides())

    @classmethod
    def _valid(cls, raw: Mapping[str, Any], source: str, overrides: Overrides) -> RunPlan:
        _require_small(raw, source)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise _explained(error, source, overrides) from error

    @property
    def remembered(self) -> bool:
        """Whether both ends go on from what each device sent before: nothing of it may be lost or count twice."""
        return self.uplink.feedback == "ef21" or self.run.algorithm != "fedavg"

    def to_json(self) -> dict[str, Any]:
        """All keys with their values, defaults included: what is stored and sent."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the canonical JSON of the resolved plan."""
        return digest_of(self.to_json())

    def check(self, codecs: CodecBook, measured: Mapping[str, DeviceTimes] | None = None) -> list[Refusal]:
        """Everything in this plan that cannot hold together, with the reason; empty when it can run."""
        return refusals(self, codecs, measured or {})

    def unknown_metrics(self, known: Collection[str]) -> dict[str, str]:
        """The keys that name none of these metrics, and what they name. Every task has a loss."""
        named = {"metric": self.run.metric, **({"target.metric": self.run.target.metric} if self.run.target else {})}
        return {key: name for key, name in named.items() if name not in (*known, "loss")}

    def require_metrics(self, known: Collection[str]) -> None:
        """`PlanError` where `metric` or `target` names none of these, which are all that the task's clients report."""
        for key, name in self.unknown_metrics(known).items():
            said = ", ".join(sorted(known))
            why, hint = f"its clients report: {said}; one that is no number is left out", f"one of them: {said}"
            if name == "accuracy":
                why, hint = f"{why}; {UNCOUNTED}", f"{COUNT_IT}, or {hint}"
            raise PlanError(f'[run] {key} = "{name[:80]}" is no metric of the task {self.run.task}', why=why, hint=hint)


def _require_small(raw: Any, source: str) -> None:
    """`PlanError` for more than MAX_VALUES values, before any of them is judged: a device is sent plans by others."""
    left, found = [raw], 0
    while left:
        inner = left.pop()
        if isinstance(inner, (Mapping, list, tuple)):
            found += len(inner)
            if found > MAX_VALUES:
                raise PlanError(
                    f"{source} holds more than {MAX_VALUES:,} values", why="that many are read", hint="shorter lists"
                )
            left += inner.values() if isinstance(inner, Mapping) else inner


def canonical(resolved: Mapping[str, Any]) -> bytes:
    """The one JSON text of a plan as it was sent: keys sorted, no spaces, ASCII."""
    return json.dumps(resolved, sort_keys=True, separators=(",", ":")).encode()


def digest_of(resolved: Mapping[str, Any]) -> str:
    """SHA-256 in hex over the canonical JSON: both ends compute it, each over what it holds."""
    return hashlib.sha256(canonical(resolved)).hexdigest()


def _explained(error: ValidationError, source: str, overrides: Overrides) -> PlanError:
    """Pydantic's findings in our three lines: each wrong key once, with every way in which it could be right."""
    found: dict[str, tuple[list[str], str]] = {}
    origins: dict[str, dict[str, None]] = {}
    for details in error.errors():
        what, why, hint = explain(RunPlan, details)
        whys, _ = found.setdefault(what, ([], hint))
        whys += [why] if why not in whys else []
        origins.setdefault(overrides.origin(place_of(details), source), {})[what] = None
    reasons = dict.fromkeys(either(whys) for whys, _ in found.values())
    hint = next(hint for _, hint in found.values())
    wrong = "; ".join(f"{origin}: {'; '.join(whats)}" for origin, whats in origins.items())
    return PlanError(wrong, why="; ".join(reasons), hint=hint)
