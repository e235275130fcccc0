"""`thinwire codecs`: list the codecs that a plan may name, and measure one on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Json
from thinwire.core import formatting

app = typer.Typer(name="codecs", help="Codecs: how an update is compressed.", invoke_without_command=True)


@app.callback()
def listed(context: typer.Context, json: Json = False) -> None:
    """List all codecs, coders and aliases that a chain is made of: topk(0.01) > int8 > zstd."""
    if context.invoked_subcommand is None:
        _list(json)


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List all codecs, coders and aliases: role, kind, bits a parameter, paper."""
    _list(json)


@app.command(name="try")
def try_(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help='chain of codecs: "topk(0.01) > int8 > zstd"')],
    params: Annotated[int, typer.Option("--params", metavar="N", help="number of parameters")] = 1_000_000,
    json: Json = False,
) -> None:
    """Measure one chain on this machine on normal values: times, bits and error, compared with a plain copy."""
    from thinwire.compression import parse
    from thinwire.compression.catalog import trials
    from thinwire.compression.spec import standing_for

    codec = parse(spec)
    found, aliases = trials(codec, params), standing_for(spec)
    if json:
        document = {"spec": codec.spec, "aliases": aliases, "params": params}
        console.document({**document, "trials": [vars(trial) for trial in found]})
        return
    for name, chain in aliases.items():
        console.line(f"{name} is measured as {chain}")
    console.line(f"{codec.spec}  {params} parameters, copied in {formatting.duration(found[0].memcpy_ms / 1000)}")
    header = ("feedback", "encode ms", "of a copy", "decode ms", "of a copy", "bits a parameter", "relative error")
    rows = [_trial(trial) for trial in found if not trial.refused]
    console.table(header, rows, right=header[1:])
    for trial in found:
        if trial.refused:
            console.line(trial.refused)


def _trial(trial: Any) -> tuple[str, ...]:
    times = [trial.encode_ms, trial.decode_ms]
    shown = [cell for ms in times for cell in (f"{ms:.3g}", f"{ms / trial.memcpy_ms:.1f}" if trial.memcpy_ms else "")]
    return "yes" if trial.feedback else "no", *shown, f"{trial.bits_per_param:.4g}", f"{trial.relative_error:.3g}"


def _list(json: bool) -> None:
    from thinwire.compression.catalog import SAMPLE, described
    from thinwire.core.plan_schema import UplinkSection

    rows = described()
    if json:
        console.document([vars(row) for row in rows])
        return
    header = ("name", "role", "kind", "bits", "in", "paper", "what")
    cells = [
        (r.name, r.role, r.kind, f"{r.bits:.3g}", r.example, r.paper, f"{r.stands_for}: {r.what}".lstrip(": "))
        for r in rows
    ]
    console.table(header, cells, right=("bits",))
    console.note(f"bits a parameter, on {SAMPLE} normal values; kinds under feedback: --json")
    first = UplinkSection().codec
    console.note(f"to begin with: {first}, which a plan without [uplink] has; it needs no error feedback")
    console.note(f'to learn more: thinwire codecs try "{first}" measures it on this machine')
