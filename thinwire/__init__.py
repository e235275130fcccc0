"""Thinwire is federated learning for devices with slow links.

`simulate` is imported only on first use: it needs torch, which an aggregator does not have to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.simulation import simulate

__version__ = "0.1.0"
__all__ = ["__version__", "simulate"]


def __getattr__(name: str) -> Any:
    """Import `simulate` on first use; raise AttributeError for any other name."""
    if name == "simulate":
        from thinwire.simulation import simulate

        return simulate
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
