"""Thinwire: federated learning over thin wires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.simulation import simulate

__version__ = "0.1.0"
__all__ = ["__version__", "simulate"]


def __getattr__(name: str) -> Any:
    """Import heavy parts only when they are asked for: `simulate` needs torch, the aggregator must not."""
    if name == "simulate":
        from thinwire.simulation import simulate

        return simulate
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
