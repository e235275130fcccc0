"""docs/reference/cli.md: every command with its arguments and options, as typer has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click
import typer

from docs.generate.table import table
from thinwire.cli.main import program


def cli_page() -> str:
    root = typer.main.get_command(program())
    text = ["# The command line", "Every command has `--help`. Data goes to stdout, progress to stderr."]
    with click.Context(root, info_name="thinwire") as context:
        text += list(_command(root, context, 2))
    return "\n\n".join(text)


def _command(command: Any, context: click.Context, depth: int) -> Iterator[str]:
    if command.hidden:
        return
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    said = inspect.cleandoc(command.help or "")
    yield f"{'#' * min(depth, 4)} {context.command_path}"
    if said:
        yield said
    if not hasattr(command, "list_commands"):
        yield f"```text\n{context.command_path} {usage}".rstrip() + "\n```"
    rows = [row for row in map(_option, command.get_params(context)) if row]
    if rows:
        yield table(("option", "default", "meaning"), rows)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            with click.Context(inner, info_name=name, parent=context) as below:
                yield from _command(inner, below, depth + 1)


def _option(parameter: Any) -> tuple[str, str, str] | None:
    if getattr(parameter, "hidden", False) or "--help" in parameter.opts:
        return None
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = parameter.human_readable_name
    elif not getattr(parameter, "is_flag", False):
        names += f" {parameter.metavar or parameter.type.name.upper().removesuffix(' RANGE')}"
    default = "needed" if parameter.required else parameter.default
    empty = default in (None, "", False, ()) or callable(default) or "Sentinel" in repr(default)
    return f"`{names}`", "" if empty else str(default), " ".join((parameter.help or "").split())
