"""docs/reference/plan.md: every key with its type, default and meaning."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.table import table
from thinwire.client.train.protocol import CARRIED, THINWIRE
from thinwire.core.plan import RunPlan


def plan_page() -> str:
    schema = RunPlan.model_json_schema()
    said = (
        "A plan is a TOML file. `[run] task` and `[local] lr` are needed; everything else has a default. "
        "`thinwire plan check PLAN` says what is wrong with one, `thinwire plan keys` prints this list. "
        "No key is ignored: one that is unknown, or a value that is not among those here, is refused."
    )
    text = ["# The plan", said]
    for name, field in RunPlan.model_fields.items():
        if name == "plan_version":
            continue
        section: Any = field.annotation
        text.append(f"## [{name}]\n\n{inspect.getdoc(section)}")
        rows = list(keys(section, schema))
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


def keys(model: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rows of a table's keys."""
    properties = schema["$defs"][model.__name__]["properties"]
    for name, field in model.model_fields.items():
        if (inner := _inner(properties[name], schema)) is not None:
            words = " ".join((field.description or schema["$defs"][inner]["description"]).split())
            table = "table or none" if field.default is None else "table"
            yield (
                f"`{name}`",
                table,
                "none" if field.default is None else "",
                words.rstrip("."),
            )
            for key, value in schema["$defs"][inner]["properties"].items():
                needed = key in schema["$defs"][inner].get("required", [])
                shown = "needed" if needed else _toml(value.get("default"))
                yield f"`{name}.{key}`", _type(value), shown, value.get("description", "")
            continue
        default = "needed" if field.is_required() else _toml(field.default)
        yield f"`{name}`", _type(properties[name]), default, (field.description or "").rstrip(".")


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
