"""The command line: a folder a noun, and in its commands.py what is typed.

Heavy parts (torch, flwr, SQLAlchemy) are imported inside the commands.
"""

from __future__ import annotations


def main() -> None:
    """Run `thinwire` and end this process with its exit code."""
    from thinwire.client.train.errors import Ending

    ending = Ending()
    from thinwire.cli.main import main as run

    ending.code = run()
    raise SystemExit(ending.code)
