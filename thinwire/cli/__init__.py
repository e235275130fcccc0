"""The command line `thinwire`: one folder for each group of commands, whose `commands.py` defines them.

Heavy dependencies (torch, flwr, SQLAlchemy) are imported inside the commands, so that `--help` stays fast.
"""

from __future__ import annotations


def main() -> None:
    """Run `thinwire` and end this process with its exit code."""
    from thinwire.client.train.errors import FastExit

    ending = FastExit()
    from thinwire.cli.main import main as run

    ending.code = run()
    raise SystemExit(ending.code)
