"""What a doctor says of the kernels: a slow path is no failure, but whoever wonders sees it here."""

from __future__ import annotations


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
    return f"{said}: the same bytes, slower; with g++ an installation builds faster ones"
