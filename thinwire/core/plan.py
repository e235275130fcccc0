"""This module reads a plan: everything about a run that a person decides, from TOML, checked, and stored resolved.

A valid plan needs two lines, `[run] task` and `[local] lr`; every other key has a default. core/plan_schema.py defines
the tables and keys. core/plan_rules.py refuses keys that contradict each other.

`--set section.key=value` overrides keys before the check (`Overrides`), so an error can name the option as its origin.
core/plan_errors.py says what is wrong with a key, why, and which value is valid.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from thinwire.core.errors import PlanError, numbered
from thinwire.core.formatting import plain
from thinwire.core.plan_codec_rules import CodecBook
from thinwire.core.plan_errors import SHOWN, places_of, wrong_values
from thinwire.core.plan_rules import DeviceTimes, Refusal, refusals
from thinwire.core.plan_schema import Sections
from thinwire.core.plan_text import delta_left_out, require_small
from thinwire.core.score_histogram import TRAINED, names_of

UNCOUNTED = (  # by client/train/evaluate.py; the aggregator knows only names, not why one is missing
    "a task without metrics() has an accuracy only where loss calls the model once and the batch is (inputs, targets), "
    "with logits (N, C) and N integers below C"
)
COUNT_IT = 'metrics(model, batch) in the task, with {"accuracy": (correct, len(targets))}'


class RunPlan(Sections):
    """A whole plan, resolved: every key has a value.

    Invariant: `digest` depends on the values of all keys, and on nothing else.

    >>> plan = RunPlan.parse('[run]\\ntask = "digits"\\n[local]\\nlr = 0.5')
    >>> plan.run.rounds, plan.uplink.codec
    (20, 'eden(1)')
    """

    @model_validator(mode="before")
    @classmethod
    def _small_delta(cls, raw: Any) -> Any:
        """Set a delta that the plan leaves out to at most 1 / (10 clients), or 1 / (10 records) in mode example."""
        privacy = raw.get("privacy") if isinstance(raw, Mapping) else None
        if not isinstance(privacy, Mapping) or "delta" in privacy or privacy.get("mode", "off") == "off":
            return raw
        return {**raw, "privacy": {**privacy, "delta": delta_left_out(raw)}}

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Mapping[str, str] | None = None,
        option: str = "--set",
        codecs: CodecBook | None = None,
    ) -> RunPlan:
        """Read a plan from a file; `overrides` are `--set section.key=value` in TOML's own notation.

        It raises PlanError if the file is not readable or is not a valid plan.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why, hint = getattr(error, "strerror", None) or str(error), "thinwire init DIR writes one"
            hint = str(Path(path, "plan.toml")) if isinstance(error, IsADirectoryError) else hint
            if isinstance(error, FileNotFoundError):
                why = "a plan is a TOML file, and there is no such file"
                hint += "; the plan of a run: thinwire runs show ID --json"
            raise PlanError(f"cannot read the plan {path}", why=why, hint=hint) from error
        return cls.parse(text, str(path), overrides, option, codecs)

    @classmethod
    def parse(
        cls,
        text: str,
        source: str = "plan",
        overrides: Mapping[str, str] | None = None,
        option: str = "--set",
        codecs: CodecBook | None = None,
    ) -> RunPlan:
        """Read a plan from TOML.

        It raises PlanError, which names all wrong keys and values at once, and `option` for those that were overridden.
        With `codecs` it also names the codecs, reductions and optimizers that are not valid beside a wrong key; alone
        they are found by `check`.
        """
        try:
            raw = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also for a number with too many digits for Python
            raise PlanError(f"{source} is not TOML", why=str(error), hint='a line reads: key = "value"') from error
        over = Overrides(overrides or {}, option)
        return cls._valid(over.put(raw), source, over, codecs)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "plan", codecs: CodecBook | None = None) -> RunPlan:
        """Read a plan from JSON values; raise PlanError if they are not a valid plan. `codecs`: as for `parse`."""
        return cls._valid(raw, source, Overrides(), codecs)

    @classmethod
    def _valid(
        cls, raw: Mapping[str, Any], source: str, overrides: Overrides, codecs: CodecBook | None = None
    ) -> RunPlan:
        require_small(raw, source)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            found = error
        try:
            cls.model_validate(raw, context=codecs)
        except ValidationError as error:
            found = error
        raise _explained(found, source, overrides) from found

    @property
    def has_client_state(self) -> bool:
        """Return True if both ends keep state about each client between rounds: no update may be lost or count
        twice.
        """
        return self.uplink.feedback == "ef21" or self.run.algorithm != "fedavg"

    def to_json(self) -> dict[str, Any]:
        """Return all keys with their values, defaults included: this form is stored and sent."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """Return the SHA-256 in hex over the canonical JSON of the resolved plan."""
        return digest_of(self.to_json())

    def check(self, codecs: CodecBook, measured: Mapping[str, DeviceTimes] | None = None) -> list[Refusal]:
        """Return all contradictions in this plan with their reasons; none if the plan can run."""
        return refusals(self, codecs, measured or {})

    def unknown_metrics(self, known: Collection[str], summed: bool = True) -> list[str]:
        """Return what in the plan names an unknown metric; with `summed` also what [secure] sums. Every task has the
        metric `loss`.
        """
        run, secure = self.run, self.secure
        places = [(run.metric, f'[run] metric = "{run.metric[:80]}"')]
        places += [(run.target.metric, f'[run] target.metric = "{run.target.metric[:80]}"')] if run.target else []
        found = [place for name, place in places if name not in (*known, "loss")]
        if not summed:
            return found
        absent = [name for name in secure.metrics if name not in (*known, "loss") and not name.startswith(TRAINED)]
        found += [f'"{name[:80]}" of [secure] metrics' for name in absent]
        absent = [name for name in secure.histograms if not {*names_of([name])} & {*known}]
        return found + [f'"{name[:80]}" of [secure] histograms' for name in absent]

    def require_metrics(self, known: Collection[str], summed: bool = True) -> None:
        """Raise PlanError if the plan names a metric that is not `known`; `known` are all that the clients report."""
        for place in self.unknown_metrics(known, summed):
            said = ", ".join(sorted(known))
            why, hint = f"its clients report: {said}; one that is no number is left out", f"one of them: {said}"
            if '"accuracy"' in place:
                why, hint = f"{why}; {UNCOUNTED}", f"{COUNT_IT}, or {hint}"
            raise PlanError(f"{place} is no metric of the task {self.run.task}", why=why, hint=hint)


def canonical(resolved: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of a plan as it is sent: keys sorted, no spaces, ASCII."""
    return json.dumps(resolved, sort_keys=True, separators=(",", ":")).encode()


def digest_of(resolved: Mapping[str, Any]) -> str:
    """Return the SHA-256 in hex over the canonical JSON; each end computes it over its own copy."""
    return hashlib.sha256(canonical(resolved)).hexdigest()


def _explained(error: ValidationError, source: str, overrides: Overrides) -> PlanError:
    """Return pydantic's errors as one PlanError: each wrong key has its own reason and its own suggestion."""
    found, origins = wrong_values(RunPlan, error), dict[str, list[str]]()
    for problem in found:
        origins.setdefault(overrides.origin(problem.place, source), []).append(problem.what)
    wrong = "; ".join(f"{origin}: {'; '.join(whats)}" for origin, whats in origins.items())
    if len(found) == 1:
        return PlanError(wrong, found[0].why, found[0].hint)
    whats = [plain(one.what)[:SHOWN] for one in found]
    return PlanError(wrong, numbered([one.why for one in found], whats), numbered([one.hint for one in found]))


@dataclass(frozen=True)
class Overrides:
    """Holds values in TOML's own notation by their key `section.key`; `option` is the option that they were typed with.

    >>> Overrides({"local.lr": "0.1", "uplink.codec": "int8"}).put({"local": {"lr": 0.5}})
    {'local': {'lr': 0.1}, 'uplink': {'codec': 'int8'}}
    """

    values: Mapping[str, str] = field(default_factory=dict)
    option: str = "--set"

    def put(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Set the values in the plan's tables, in place; return `raw`."""
        for place, value in self.values.items():
            *tables, key = place.split(".")
            if not tables or not all((*tables, key)):
                full = (
                    []
                    if tables
                    else [f"{self.option} {one}={self.values[place][:SHOWN]}" for one in places_of(RunPlan, key)]
                )
                hint = ", or ".join(full) or f"{self.option} section.key=value, as in {self.option} local.lr=0.1"
                raise PlanError(f"{self._typed(place)} names no key", why="each key is in a section", hint=hint)
            table = raw
            for name in tables:
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    why, hint = f"{name} is a value there, and has no keys", f"thinwire plan keys {tables[0]}"
                    raise PlanError(f"{self._typed(place)} names no key", why=why, hint=hint)
            table[key] = self._parsed(place, value)
        return raw

    def origin(self, place: Sequence[str], source: str) -> str:
        """Return the origin of the value at `place`: `source`, the option, or `source` with the option."""
        near = [key for key in self.values if all(a == b for a, b in zip(key.split("."), place, strict=False))]
        typed = " ".join(map(self._typed, near))
        is_typed = any(len(key.split(".")) <= len(place) for key in near)
        return typed if is_typed else f"{source} with {typed}" if near else source

    def _parsed(self, place: str, value: str) -> Any:
        """Return the value that TOML reads; a bare word is a string."""
        try:
            found = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            found = {"value": value}
        except (ValueError, RecursionError) as error:  # too many digits or brackets for Python
            raise PlanError(f"{self._typed(place)} is not readable", why=str(error), hint="a shorter value") from error
        if len(found) > 1 or (found["value"] == value and len(value.splitlines()) > 1):
            hint = f"one {self.option} for each key"
            raise PlanError(f"{self._typed(place)} is more than a value", why="it has several lines", hint=hint)
        return found["value"]

    def _typed(self, place: str) -> str:
        value = "\\n".join(self.values[place].splitlines())
        return f"{self.option} {place}={value if len(value) <= SHOWN else value[:SHOWN] + '...'}"
