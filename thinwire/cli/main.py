"""The root command `thinwire`: it assembles all command groups and turns every exception into an exit code.

Errors go to stderr in three lines (`error:`, `why:`, `try:`). Exit codes: a `ThinwireError` carries its own, 2 is a
usage error, 130 is Ctrl-C, and 1 is an internal error or a missing torch.
"""

from __future__ import annotations

import io
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from thinwire.cli import console
from thinwire.core.signals import INTERRUPTED

if TYPE_CHECKING:
    from thinwire.core.registry import Blame


USAGE = 2

NOUNS = {
    "aggregator": "aggregator.commands", "client": "client.commands", "runs": "runs.commands",
    "devices": "devices.commands", "privacy": "privacy", "plan": "plan", "task": "task", "codecs": "codecs",
}  # fmt: skip
ELSEWHERE = dict.fromkeys(("runs submit", "runs start", "runs new", "plan run", "plan submit"), "thinwire run PLAN")
VERBS = {"demo": "demo.commands", "init": "plan", "run": "run", "sim": "sim"}


def program(word: str = "") -> typer.Typer:
    """Return the command line: the noun or verb `word` alone if there is one, which starts sooner, else all."""
    app = typer.Typer(name="thinwire", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(top)
    known = word in NOUNS or word in VERBS
    for noun, module in NOUNS.items():
        if noun == word or not known:
            app.add_typer(import_module(f"thinwire.cli.{module}").app)
    for verb, module in VERBS.items():
        if verb == word or not known:
            app.command()(getattr(import_module(f"thinwire.cli.{module}"), verb))
    return app


def _version(is_given: bool) -> None:
    if is_given:
        from thinwire import __version__

        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


def top(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """Federated learning over thin wires: one aggregator, many unequal clients.

    Start here: thinwire demo. Then your own model: thinwire init DIR.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Every failure is printed to stderr as error / why / try. `arguments` defaults to those of this process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack letters of device names
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        console.typed(words)
        answer = program(words[0] if words else "")(args=words, standalone_mode=False)
        sys.stdout.flush()
        return answer if isinstance(answer, int) else 0
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "thinwire"
        what, why = refusal(error)
        hint = ELSEWHERE.get(" ".join(words[:2]), f"{where} --help")
        return _say(f"error: {what}", f"why:   {why}", f"try:   {hint}", code=USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:  # click exits this way when the reader closes the pipe: thinwire runs list | head
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0
    except Exception as error:
        return _failed(error)


# Modules that only `thinwire[server]` installs: Flower, the database and the web server.
OF_THE_SERVER = frozenset({"flwr", "sqlalchemy", "alembic", "fastapi", "starlette", "uvicorn", "uvloop", "httptools"})


def _failed(error: Exception) -> int:
    """Print an exception of a command as error / why / try and return the exit code.

    An unexpected exception is printed with its traceback. It is attributed to an installed plugin if its code raised
    it.
    """
    from thinwire.core.errors import PlanError, ThinwireError
    from thinwire.core.formatting import plain

    if isinstance(error, ThinwireError):
        return _say(*map(plain, console.as_typed(error.text()).split("\n")), code=error.exit_code)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return _say(
            "error: this command needs torch, which is not installed",
            "why:   which build is right depends on the device: CPU only, CUDA or Jetson",
            "try:   CPU:    pip install torch --index-url URL of torch's index of CPU builds",
            "       CUDA:   pip install torch",
            "       Jetson: the wheel of NVIDIA's JetPack page for this version of JetPack",
            code=1,
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in OF_THE_SERVER:
        return _say(
            "error: this command needs the aggregator's part, which is not installed",
            f"why:   there is no {error.name}; a device installs thinwire[client], which has none",
            "try:   pip install 'thinwire[server]'",
            code=1,
        )
    traceback.print_exc()
    if blame := _blamed(error):
        return _say(
            plain(f"error: {blame.said(error)}"),
            f"why:   {blame.place} is code of {blame.package}, which is installed here, and not Thinwire's",
            f"try:   {_looked_into(blame)}; its authors want to know",
            code=PlanError.exit_code,
        )
    return _say(
        f"error: a defect of Thinwire: {type(error).__name__}: {error}",
        "try:   the lines above say where; please report them",
        code=1,
    )


def _blamed(error: Exception) -> Blame | None:
    """Return the codec, optimizer or reduction of others whose code raised this exception; None if no plugin did."""
    codecs = sys.modules.get("thinwire.compression.catalog")
    optimizers = sys.modules.get("thinwire.aggregation.server_optimizers")
    reductions = sys.modules.get("thinwire.aggregation.reductions")
    if codecs is None or optimizers is None or reductions is None:
        return None
    from thinwire.core.registry import blamed

    return blamed(error, codecs.steps, optimizers.optimizers, reductions.reductions)


def _looked_into(blame: Blame) -> str:
    """Return the next step for a plugin's author: the conformance suite for a codec, else the how-to page."""
    if blame.kind == "reduction":
        return "docs/how/own-aggregation.md lists what it gets and returns"
    if blame.kind == "codec":
        return f"pytest --thinwire-codec {blame.entry} looks for more"
    return "docs/how/your-own-optimizer.md lists what it gets and returns"


def _say(*lines: str, code: int) -> int:
    print("\n".join(lines), file=sys.stderr, flush=True)
    return code


SUGGESTED = " Did you mean "  # click and typer add names that are spelled alike, which may not be what was meant


def refusal(error: click.ClickException) -> tuple[str, str]:
    """Return (what, why) for a command line that the option parser rejects; `why` is never empty.

    For an unknown option or command it lists all that there are.

    >>> refusal(click.BadParameter("'x' is not a valid integer.", param_hint="'--clients'"))
    ("Invalid value for '--clients'", "'x' is not a whole number")
    >>> refusal(click.BadParameter("'0.5' is no target: --to metric=value"))
    ("'0.5' is no target", '--to metric=value')
    """
    said = error.format_message().replace(" (Did you mean one of: ", SUGGESTED)
    what, _, near = said.partition(SUGGESTED)
    meant = f"did you mean {near.split('?')[0]}? " if near else ""
    context: Any = getattr(error, "ctx", None)
    if isinstance(error, click.MissingParameter):
        return what, _meaning(error.param) or _form(context)
    if isinstance(error, click.BadParameter):
        is_ours = error.param is None and error.param_hint is None  # raised by a command, and not by the parser
        what, _, why = (error.message if is_ours else what).partition(": ")
        return what, _plainly(why) or _form(context)
    if isinstance(error, click.BadOptionUsage):
        takes = "requires" in error.message
        return what, "its value is to stand behind it" if takes else "it is set by its name alone"
    command = context.command if context else None
    if isinstance(error, click.NoSuchOption) and command:
        return what, f"{meant}there are {', '.join(_options(command, context))}"
    if isinstance(command, click.Group):
        return what, f"{meant}there are {', '.join(command.list_commands(context))}"
    return what, meant.rstrip() or _form(context)


WHOLE = re.compile(r"a valid integer(?: range)?")
NUMBER = re.compile(r"a valid float(?: range)?")
LEAST = re.compile(r"is not in the range x>=")
BETWEEN = re.compile(r"is not in the range ([-.\w]{1,40})<=x<=")
PLAIN = {  # what click says of a value, and what it means
    WHOLE: "a whole number", NUMBER: "a number", LEAST: "is less than ", BETWEEN: r"is not from \1 to ",
}  # fmt: skip


def _plainly(said: str) -> str:
    """Return what click says of a value in plain words, without the full stop.

    >>> _plainly("0 is not in the range x>=1."), _plainly("'x' is not a valid integer range.")
    ('0 is less than 1', "'x' is not a whole number")
    """
    for theirs, ours in PLAIN.items():
        said = theirs.sub(ours, said)
    return said.removesuffix(".")


def _meaning(param: Any) -> str:
    """Return the sentence that says what a missing parameter is for, from its help text; "" without one."""
    said = getattr(param, "help", None)
    return f"it is needed: {said}" if said else ""


def _options(command: click.Command, context: click.Context) -> list[str]:
    """Return the long names of a command's visible options."""
    found = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
    return [max(one.opts, key=len) for one in found]


def _form(context: click.Context | None) -> str:
    """Return the usage of a command as a sentence."""
    if context is None:
        return "the command is typed in another way"
    return f"it reads: {' '.join([context.command_path, *context.command.collect_usage_pieces(context)])}"
