"""Start every benchmark: `python -m benchmarks.NAME [--preset P] [--json]`, and what some of them add."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.document import document, show

P = TypeVar("P")
Measured = tuple[list[dict[str, Any]], dict[str, float]]  # rows, and the figures that they come to


def arguments(name: str, about: str, presets: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of `--preset` and `--json`; `about` is the module's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about, formatter_class=raw)
    parser.add_argument("--preset", choices=list(presets), default="small")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def timed_ms(work: Callable[[], object]) -> float:
    """The milliseconds that a call takes."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def end_what_we_started() -> None:
    """SIGTERM ends a benchmark as Ctrl-C does, with all `finally` and `with`: processes that it started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run_in_folder(name: str, about: str, presets: Mapping[str, P], measure: Callable[[P, Path], Measured]) -> None:
    """The whole of a benchmark that adds no option and needs a folder while it lasts."""
    given = arguments(name, about, presets).parse_args()
    end_what_we_started()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        rows, figures = measure(presets[given.preset], Path(folder))
    show(document(name, given.preset, rows, figures), given.json)
