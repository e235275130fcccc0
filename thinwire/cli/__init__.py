"""The command line `thinwire`: one folder for each group of commands, whose `commands.py` defines them.

Heavy dependencies (torch, flwr, SQLAlchemy) are imported inside the commands, so that `--help` stays fast.
"""

from __future__ import annotations

import gc

COLLECTED_AFTER = 50_000  # new objects; with Python's default the collector walks the imported modules many times


def main() -> None:
    """Run `thinwire` and end this process with its exit code."""
    gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])
    from thinwire.client.train.errors import FastExit

    ending = FastExit()
    from thinwire.cli.main import main as run

    ending.code = run()
    raise SystemExit(ending.code)
