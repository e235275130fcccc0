"""The command line: one file a noun. Heavy parts are imported inside the commands."""

from __future__ import annotations


def main() -> None:
    """Run `thinwire` and end the process with its exit code."""
    from thinwire.cli.app import run

    raise SystemExit(run())
