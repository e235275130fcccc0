"""The commands `thinwire privacy report` and `verify`: a signed document on one run for a data-protection officer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id of a run, its unique beginning, or latest")],
    json: Json = False,
    html: Annotated[bool, typer.Option("--html", help="print one HTML page")] = False,
    home: Home = None,
) -> None:
    """Report on a run's differential privacy by NIST SP 800-226, signed by the aggregator's key.

    Redirect --json or --html to a file; anyone can check it with `thinwire privacy verify FILE --pin KEY`.
    """
    from thinwire.cli.local_state import aggregator_home, opened
    from thinwire.core.errors import UsageError
    from thinwire.reports.privacy_report import privacy_report, report_lines
    from thinwire.reports.signed_report import as_page, sign_report, signing_key

    if json and html:
        raise UsageError("--json and --html", why="the report has one form at a time", hint="leave one of them out")
    with opened(home) as store:
        made = privacy_report(store, store.run(run))
    signed = sign_report(made, signing_key(aggregator_home(home)))
    if json:
        console.document(signed)
    elif html:
        sys.stdout.write(as_page(signed))  # as it is: a page that was changed is not valid
    else:
        before = ""
        for label, text in report_lines(signed):
            console.sentence(text, begin=f"{'' if label == before else label:<11}")
            before = label or before
        console.sentence(f"{signed['signed_by']} (this print is not signed: --json or --html is)", begin="signed by  ")


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="report as --json or --html printed it")],
    pin: Annotated[str, typer.Option("--pin", metavar="KEY", help="SHA-256 of the aggregator's key, 64 hex digits")],
    json: Json = False,
) -> None:
    """Check that a privacy report is what the aggregator with this key signed."""
    from thinwire.core.errors import UsageError
    from thinwire.reports.signed_report import LARGEST, verify_report

    try:
        with open(file, "rb") as opened_file:
            data = opened_file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read {file}", why=error.strerror or str(error), hint="another FILE") from error
    found = verify_report(data, pin)
    said = {"run": found["run"]["id"], "made_at": found["made_at"], "signed_by": found["signed_by"]}
    if json:
        console.document(said)
    else:
        console.line(f"valid: the report on {said['run']} of {said['made_at']}, signed by {said['signed_by']}")
