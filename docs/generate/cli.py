"""docs/reference/cli.md and environment.md: commands, options and environment variables, as typer has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click
import typer

from docs.generate.table import table
from thinwire.cli.main import program

# Variables that no option declares; those of tests are in CONTRIBUTING.md.
READ_BY_CODE = {
    "THINWIRE_HOME": "state directory, if `--home` is not given",
    "XDG_STATE_HOME": "parent of the state directory, if `--home` and `THINWIRE_HOME` are not given; "
    "default: `~/.local/state`",
    "XDG_CONFIG_HOME": "parent of `systemd/user`, where `service install` writes a unit; default: `~/.config`",
    "THINWIRE_INVITE": "invitation that `thinwire client join URL -` reads before standard input",
    "THINWIRE_KERNELS": "instruction set of the kernels (`numpy`: no kernels); default: the best one of the machine, "
    "and all give the same bytes",
    "THINWIRE_THREADS": "threads of codecs and aggregation, instead of `[local] codec_threads` and `[server] threads`; "
    "0: all cores",
    "THINWIRE_OPTIMIZED": "compiler's option when the kernels are built from source; default: `-O3`",
    "HTTPS_PROXY": "proxy through which a client reaches the aggregator; also `https_proxy`",
    "NO_PROXY": "hosts that a client reaches without the proxy; also `no_proxy`",
}


def cli_page() -> str:
    root = typer.main.get_command(program())
    text = ["# The command line", "Every command has `--help`. Data goes to stdout, progress to stderr."]
    with click.Context(root, info_name="thinwire") as context:
        text += list(_command(root, context, 2))
    return "\n\n".join(text)


def environment_page() -> str:
    """Return one row a variable: those that options declare with `envvar`, then those that the code reads."""
    root = typer.main.get_command(program())
    with click.Context(root, info_name="thinwire") as context:
        rows = [*_variables(root, context), *READ_BY_CODE.items()]
    cells = [(f"`{name}`", meaning) for name, meaning in rows]
    return "\n\n".join([
        "# Environment variables", "An option or an argument of the command line wins over its variable.",
        table(("variable", "meaning"), cells),
    ])  # fmt: skip


def _variables(command: Any, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(context):
        if parameter.envvar:
            yield parameter.envvar, f"`{parameter.opts[0]}` of `{context.command_path}`: {parameter.help}"
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        with click.Context(inner, info_name=name, parent=context) as below:
            yield from _variables(inner, below)


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
    meaning = " ".join((parameter.help or "").split())
    if parameter.envvar:
        meaning += f" (environment: {parameter.envvar})"
    return f"`{names}`", "" if empty else str(default), meaning
