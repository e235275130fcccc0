"""`thinwire`: the nouns together, and how any of them may end."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import click
import typer

from thinwire.cli import codecs, demo, init, plan, run, task
from thinwire.cli.aggregator import commands as aggregator
from thinwire.cli.client import commands as client
from thinwire.cli.devices import commands as devices
from thinwire.cli.runs import commands as runs
from thinwire.cli.sim import commands as sim
from thinwire.cli.usage import refusal

if TYPE_CHECKING:
    from thinwire.core.blame import Blame

INTERRUPTED = 130
USAGE = 2

app = typer.Typer(name="thinwire", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for noun in (aggregator, client, runs, devices, plan, task, codecs):
    app.add_typer(noun.app)
for verb in (demo.demo, init.init, run.run, sim.sim):
    app.command()(verb)


def _version(asked: bool) -> None:
    if asked:
        from thinwire import __version__

        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """Federated learning over thin wires: one aggregator, many unequal clients.

    Start here: thinwire demo. Then your own model: thinwire init DIR.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; whatever goes wrong is said as error / why / try on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # what others said may have letters that no terminal has
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        answer = app(args=words, obj=words, standalone_mode=False)
        sys.stdout.flush()
        return answer if isinstance(answer, int) else 0
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as asked:
        print(asked.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "thinwire"
        what, why = refusal(error)
        return _say(f"error: {what}", f"why:   {why}", f"try:   {where} --help", code=USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:  # what click makes of a reader that has seen enough: thinwire runs list | head
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    from thinwire.core.errors import PlanError, ThinwireError
    from thinwire.core.texts import plain

    if isinstance(error, ThinwireError):
        return _say(*map(plain, error.text().split("\n")), code=error.exit_code)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return _say(
            "error: this command needs torch, which is not installed",
            "why:   which build is right depends on the device: CPU only, CUDA or Jetson",
            "try:   CPU:    pip install torch --index-url URL of torch's index of CPU builds",
            "       CUDA:   pip install torch",
            "       Jetson: the wheel of NVIDIA's JetPack page for this version of JetPack",
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
    """Whose installed codec or server optimizer raised it; where none was in use, nobody's."""
    aggregation = sys.modules.get("thinwire.aggregation")
    if aggregation is None:
        return None
    from thinwire.core.blame import blamed

    return blamed(error, aggregation.registry.steps, aggregation.optimizers)


def _looked_into(blame: Blame) -> str:
    if blame.kind == "codec":
        return f"pytest --thinwire-codec {blame.entry} looks for more"
    return "docs/how/your-own-codec.md says what it is given and gives"


def _say(*lines: str, code: int) -> int:
    print("\n".join(lines), file=sys.stderr, flush=True)
    return code
