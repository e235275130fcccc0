"""What a doctor says of the kernels: a slow path is no failure, but whoever wonders sees it here."""

from __future__ import annotations


def kernels() -> str:
    """The path in use and the threads of one call; UsageError when the environment forces one that is not here."""
    from thinwire.aggregation.native.path import NUMPY, VARIABLE, available, chosen
    from thinwire.aggregation.native.threads import threads

    path, count = chosen(), threads()
    said = f"{path}, {count} thread{'s' if count > 1 else ''}"
    if path != NUMPY:
        return said
    if len(available()) > 1:
        return f"{said}: forced by {VARIABLE}"
    return f"{said}: the same bytes, slower; with g++ an installation builds faster ones"
