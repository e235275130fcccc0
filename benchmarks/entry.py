"""How every benchmark is started: `python -m benchmarks.NAME [--preset P] [--json]`, and what some of them add."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable


def arguments(name: str, about: str, presets: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of `--preset` and `--json`; `about` is the module's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about, formatter_class=raw)
    parser.add_argument("--preset", choices=list(presets), default="small")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def end_what_we_started() -> None:
    """SIGTERM ends a benchmark as Ctrl-C does, with all `finally` and `with`: processes that it started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
