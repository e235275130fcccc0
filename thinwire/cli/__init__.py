"""The command line `thinwire`: one folder for each group of commands, whose `commands.py` defines them.

Heavy dependencies (torch, flwr, SQLAlchemy) are imported inside the commands, so that `--help` stays fast.
"""

from __future__ import annotations

import gc
import sys

READING = ("runs", "devices", "privacy", "plan", "codecs")  # commands that end soon, and run no code of a user's
COLLECTED_AFTER = 50_000  # new objects; with Python's default the collector walks the imported modules many times


def main() -> None:
    """Run `thinwire` and end this process with its exit code."""
    if sys.argv[1:2] and sys.argv[1] in READING:
        gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])
    from thinwire.client.train.errors import FastExit

    ending = FastExit()
    from thinwire.cli.main import main as run

    ending.code = run()
    raise SystemExit(ending.code)
