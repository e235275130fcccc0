"""docs/reference/plan.md: every key with its type, default and meaning, and what of it this version refuses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, get_args, get_origin

from docs.generate.table import table
from thinwire.aggregation.reductions import reduction_of
from thinwire.client.train.protocol import CARRIED, THINWIRE
from thinwire.core.errors import PlanError
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import refusals

Refused = Callable[[str, Any], str]


def plan_page() -> str:
    schema = RunPlan.model_json_schema()
    said = (
        "A plan is a TOML file. `[run] task` and `[local] lr` are needed; everything else has a default. "
        "`thinwire plan check PLAN` says what is wrong with one, `thinwire plan keys` prints this list. Keys that a "
        "later version honours are in the format already; a value that this version cannot honour is refused, never "
        "ignored."
    )
    text = ["# The plan", said]
    for name, field in RunPlan.model_fields.items():
        if name == "plan_version":
            continue
        section: Any = field.annotation
        text.append(f"## [{name}]\n\n{inspect.getdoc(section)}")
        rows = list(keys(section, schema, partial(_refused, name)))
        text.append(table(("key", "value", "default", "meaning"), rows))
        if name == "local":
            text.append(_own_functions())
    return "\n\n".join(text)


def _own_functions() -> str:
    """Who carries out each key of [local] where the task has its own optimizer() or train()."""
    said = (
        "### Keys of [local] with a task's own functions\n\n"
        "A task's own `optimizer(params, local)` gets the whole section as `local`, and its `train(model, data, "
        "context)` gets it as `context.local`. *The function* means that your code carries the key out. *Refused* "
        "means that `task check`, `sim`, `run` and the device refuse any value but the default: nobody could say "
        "that it was carried out. A `train()` that never calls `context.lr()` fails if the plan has a schedule, "
        "and one that never calls `context.should_stop()` fails with `partial` or `overlap`. A task that has an "
        '`optimizer()` and no `train()` needs `optimizer = "task"`. A `batch` that is not the default must be the '
        "batch size of a `DataLoader` that `data(client)` gives."
    )
    rows = [
        (
            f"`{key}`",
            THINWIRE,
            carried.optimizer,
            "; ".join([carried.train, *(f"`{json.dumps(v)}` refused" for v in carried.values)]),
        )
        for key, carried in CARRIED.items()
    ]
    return said + "\n\n" + table(("key", "without either", "with `optimizer()`", "with `train()`"), rows)


def keys(model: Any, schema: Mapping[str, Any], refused: Refused) -> Iterator[tuple[str, ...]]:
    """The rows of a table's keys; `refused` says what of a key's values is not built."""
    properties = schema["$defs"][model.__name__]["properties"]
    for name, field in model.model_fields.items():
        if (inner := _inner(properties[name], schema)) is not None:
            words = " ".join((field.description or schema["$defs"][inner]["description"]).split())
            table = "table or none" if field.default is None else "table"
            yield (
                f"`{name}`",
                table,
                "none" if field.default is None else "",
                _sentence(words, refused(name, field)),
            )
            for key, value in schema["$defs"][inner]["properties"].items():
                needed = key in schema["$defs"][inner].get("required", [])
                shown = "needed" if needed else _toml(value.get("default"))
                yield f"`{name}.{key}`", _type(value), shown, value.get("description", "")
            continue
        default = "needed" if field.is_required() else _toml(field.default)
        yield f"`{name}`", _type(properties[name]), default, _sentence(field.description, refused(name, field))


def _inner(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    options = [value, *value.get("anyOf", [])]
    names = [str(option["$ref"]).rpartition("/")[2] for option in options if "$ref" in option]
    return names[0] if names and names[0] in schema["$defs"] else None


def _toml(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case _:
            return f"`{value}`"


def _type(value: Mapping[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(_type(option) for option in value["anyOf"] if option.get("type") != "null")
    if "enum" in value or "const" in value:
        return " or ".join(_toml(option) for option in value.get("enum", [value.get("const")]))
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}"
    if value.get("type") == "object":
        return f"table of {_type(value['additionalProperties'])}"
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "under"}
    said = [f"{limits[key]} {value[key]}" for key in limits if key in value and abs(value[key]) < 2**31]
    return ", ".join([words[str(value["type"])], *said])


def _sentence(description: str | None, refused: str) -> str:
    return "; ".join(part.rstrip(".") for part in (description, refused) if part)


class _AnyCodec:
    """A book that knows every codec: only what this version does not have is looked for."""

    def parse(self, spec: str) -> Any: ...
    def feedback_of(self, uplink: Any) -> str:
        return "classic"

    def require_contraction(self, spec: str, feedback: str) -> None: ...
    def require_alone(self, spec: str) -> None: ...
    def require_downlink(self, spec: str) -> None: ...
    def require_optimizer(self, server: Any) -> None: ...
    def require_uplink(self, uplink: Any) -> None: ...
    def require_fixed_size(self, spec: str) -> None: ...
    def require_ladder(self, uplink: Any) -> None: ...
    def leaves_zeros(self, spec: str) -> bool:
        return False

    def reduction_of(self, spec: str) -> Any:
        return reduction_of("median")


def _refused(place: str, name: str, field: Any) -> str:
    """What of a key's values `core/plan_schema.py` refuses, found by trying some."""
    tried = {
        _toml(value): _unbuilt(place, name, value) for value in _samples(field.annotation) if value != field.default
    }
    known = [found for found in tried.values() if found is not None]
    if not any(known):
        return ""
    if all(known):
        return "**only the default in this version**"
    return "not in this version: " + ", ".join(shown for shown, found in tried.items() if found)


def _samples(annotation: Any) -> list[Any]:
    """Some values of a type, wrong ones among them."""
    options = get_args(annotation) or (annotation,)
    values: list[Any] = [option for option in options if isinstance(option, str)]
    values += [
        [_samples(inner)[0]]
        for option in (annotation, *options)
        if get_origin(option) is list
        for inner in get_args(option)
    ]
    plain: dict[str, Any] = {"bool": True, "int": 7, "float": 0.25}
    values += [some for word, some in plain.items() if word in str(annotation)]
    values += ["device", "x"] if annotation is str else []
    for option in options:
        if inspect.isclass(option) and hasattr(option, "model_fields"):
            values.append({key: _samples(inner.annotation)[0] for key, inner in option.model_fields.items()})
        values += [v for v in get_args(option) if isinstance(v, str)]
    return values


def _unbuilt(place: str, name: str, value: Any) -> bool | None:
    raw: dict[str, dict[str, Any]] = {"run": {"task": "t"}, "local": {"lr": 1.0}}
    raw.setdefault(place, {})[name] = value
    try:
        plan = RunPlan.from_json(raw)
    except PlanError:
        return None
    return any("does not have it yet" in refusal.why for refusal in refusals(plan, _AnyCodec(), {}))
