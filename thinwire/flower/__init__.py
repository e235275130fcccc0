"""This package connects Thinwire and Flower: our fleet over an embedded SuperLink, and stock Flower nodes over a second
one. `mod` and `wrap` compress the updates of a plain Flower app.

Invariant: the SuperLink of stock nodes knows no device and no run of ours.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.flower.compressed_app import mod, wrap
    from thinwire.flower.fleet import FlowerFleet
    from thinwire.flower.stock_gateway import stock_guests

__all__ = ["FlowerFleet", "mod", "stock_guests", "wrap"]

# flwr reads these variables when it is imported: it must send nothing on its own.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
os.environ.update(QUIET)

_WHERE = {
    "FlowerFleet": "thinwire.flower.fleet",
    "mod": "thinwire.flower.compressed_app",
    "wrap": "thinwire.flower.compressed_app",
    "stock_guests": "thinwire.flower.stock_gateway",
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use; raise AttributeError for any other name."""
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.flower' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
