"""`--sweep KEY=A|B`: one key of the plan with several values."""

from __future__ import annotations

import re

import typer

# A comma outside of brackets and quotes: `topk(0.1), qsgd(4, l2)` are two.
COMMA = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)(?![^(]*\))')


def axes(given: list[str]) -> dict[str, list[str]]:
    """Keys with their values, which stand apart by | where there is one, else by commas; a usage error says what not.

    >>> axes(["local.lr=0.05,0.1", "uplink.codec=identity|topk(0.01) > int8", "uplink.codec=int8,qsgd(4, l2)"][:2])
    {'local.lr': ['0.05', '0.1'], 'uplink.codec': ['identity', 'topk(0.01) > int8']}
    """
    found: dict[str, list[str]] = {}
    for one in given:
        key, equals, text = one.partition("=")
        key = key.strip()
        values = [value.strip() for value in (text.split("|") if "|" in text else COMMA.split(text))]
        if not equals or "." not in key or not all(values):
            raise typer.BadParameter(f"{one!r} has no values: --sweep section.key=A|B, as in --sweep local.lr=0.05,0.1")
        if key in found:
            raise typer.BadParameter(f"{key} is swept twice: put all its values into one --sweep {key}=A|B")
        if key == "run.seed":
            raise typer.BadParameter("seeds are not swept: --seeds 5 takes the plan's and the four that follow it")
        if key == "run.task":
            raise typer.BadParameter("tasks are not swept: the runs of a group train one code; a sweep for each task")
        found[key] = list(dict.fromkeys(values))
    return found
