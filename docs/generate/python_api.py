"""The reference page of the Python API: what a notebook or a task imports, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

# What users import, by the module that they import it from. Everything else may change without a note.
PUBLIC = {
    "thinwire": ("simulate",),
    "thinwire.simulation": ("History", "RunFailed"),
    "thinwire.core.events": ("RoundClosed", "Evaluated"),
    "thinwire.client": ("ClientInfo", "Context", "Split", "held_out", "own_part"),
    "thinwire.client.adapters.lightning": ("task",),
    "thinwire.client.adapters.sklearn": ("task", "fitted"),
    "thinwire.client.adapters.transformers": ("task", "evaluator"),
    "thinwire.aggregation": ("Reduction", "CoordinateWise", "Combination", "ServerOptimizer"),
    "thinwire.compression": ("parse",),
}
WIDE = 100  # characters of a signature in one line
INTRO = """\
# The Python API

What a notebook, a task or an aggregation of your own imports. [Run experiments](../how/run-experiments.md) shows
`simulate` at work, [your own model](../start/your-own-model.md) a task, [your own
aggregation](../how/own-aggregation.md) a reduction, and [your own codec](../how/your-own-codec.md) a codec."""


def python_page() -> str:
    """Return the page: a heading for each module, and each of its names with its signature and docstring."""
    return "\n\n".join([INTRO, *_modules()])


def _modules() -> Iterator[str]:
    for place, names in PUBLIC.items():
        module = import_module(place)
        yield f"## `{place}`"
        for name in names:
            yield from _thing(module, name)


def _thing(module: ModuleType, name: str) -> Iterator[str]:
    thing = getattr(module, name)
    yield f"### `{name}`"
    yield _code(name, thing)
    yield _prose(thing)
    if inspect.isclass(thing):
        for inner, member in vars(thing).items():
            called = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inner.startswith("_") or not inspect.getdoc(called) or isinstance(member, classmethod):
                continue
            if inspect.isfunction(called):
                yield f"**`.{_signature(inner, called, bound=True)}`** {_prose(called)}"
            elif isinstance(member, property):
                yield f"**`.{inner}`** {_prose(member)}"


def _code(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and not is_dataclass(thing) and "__init__" not in vars(thing):
        return f"```python\nclass {name}\n```"
    return f"```python\n{_signature(name, thing)}\n```"


def _signature(name: str, thing: Any, bound: bool = False) -> str:
    """Return a call as people write it; one that is too long for a line has a line for each argument."""
    signature = inspect.signature(thing)
    given = list(_arguments(one for one in signature.parameters.values() if not (bound and one.name == "self")))
    returned = "" if inspect.isclass(thing) else f" -> {signature.return_annotation}"
    one_line = f"{name}({', '.join(given)}){returned}"
    if len(one_line) <= WIDE or bound:
        return one_line
    return f"{name}(\n{''.join(f'    {one},{chr(10)}' for one in given)}){returned}"


def _arguments(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    """Yield each argument with its type and default, and `*` before those that are given by name only."""
    by_name = False
    for one in parameters:
        if one.name.startswith("_"):
            continue
        if one.kind is one.KEYWORD_ONLY and not by_name:
            by_name = True
            yield "*"
        default = "..." if "factory" in repr(one.default) else repr(one.default)
        typed = f"{one.name}: {one.annotation}" if one.annotation is not one.empty else one.name
        yield typed if one.default is one.empty else f"{typed} = {default}"


def _prose(thing: Any) -> str:
    """Return the docstring with its examples as code."""
    text = inspect.getdoc(thing) or ""
    parts = []
    for paragraph in text.split("\n\n"):
        code = paragraph.startswith(">>>")
        plain = re.sub(r"\s*# doctest: \+\w+", "", paragraph)
        parts.append(f"```python\n{plain}\n```" if code else re.sub(r"\s*\n\s*", " ", plain))
    return "\n\n".join(parts)
