"""What a doctor says of the kernels: a slow path is no failure, but whoever wonders sees it here."""

from __future__ import annotations

from pathlib import Path


def kernels() -> str:
    """The path in use and how many threads; UsageError when the environment forces what cannot be."""
    from thinwire.aggregation.native import threads
    from thinwire.aggregation.native.path import NUMPY, VARIABLE, available, chosen

    path, count = chosen(), threads.of_environment()
    said = f"{path}, threads as each plan says"
    if count:
        said = f"{path}, {count} thread{'s' if count > 1 else ''} by {threads.VARIABLE}"
    if path != NUMPY:
        return said
    if len(available()) > 1:
        return f"{said}: forced by {VARIABLE}"
    return f"{said}: {_missing()}; the same bytes, slower; with g++ an installation builds faster ones"


def _missing() -> str:
    """Why there is no path but numpy."""
    from importlib.machinery import EXTENSION_SUFFIXES

    from thinwire.aggregation import native

    folder = Path(native.__file__).parent
    if any((folder / f"kernels{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return "its kernels are of another version or another processor"
    return "no kernels were built at its installation"
