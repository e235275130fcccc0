"""A command line that the parser of options refuses: what is wrong with it, and why."""

from __future__ import annotations

from typing import Any

import click


def refusal(error: click.ClickException) -> tuple[str, str]:
    """(what, why); `why` is never empty.

    >>> refusal(click.BadParameter("'x' is not a valid integer.", param_hint="'--clients'"))
    ("Invalid value for '--clients'", "'x' is not a valid integer.")
    """
    what, _, near = error.format_message().partition(" Did you mean ")  # click and typer both say it
    if near:
        return what, f"did you mean {near.split('?')[0]}?"
    context: Any = getattr(error, "ctx", None)
    if isinstance(error, click.MissingParameter):
        return what, _meaning(error.param) or _form(context)
    if isinstance(error, click.BadParameter):
        what, _, why = what.partition(": ")
        return what, why or _form(context)
    if isinstance(error, click.BadOptionUsage):
        takes = "requires" in error.message
        return what, "its value is to stand behind it" if takes else "it is set by its name alone"
    command = context.command if context else None
    if isinstance(error, click.NoSuchOption) and command:
        return what, f"there are {', '.join(_options(command, context))}"
    if isinstance(command, click.Group):
        return what, f"there are {', '.join(command.list_commands(context))}"
    return what, _form(context)


def _meaning(param: Any) -> str:
    """What a parameter is for, in the words of its help."""
    said = getattr(param, "help", None)
    return f"it is needed: {said}" if said else ""


def _options(command: click.Command, context: click.Context) -> list[str]:
    """The long names of those that are shown."""
    found = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
    return [max(one.opts, key=len) for one in found]


def _form(context: click.Context | None) -> str:
    """How the command is typed."""
    if context is None:
        return "the command is typed in another way"
    return f"it reads: {' '.join([context.command_path, *context.command.collect_usage_pieces(context)])}"
