"""Flower as the engine: FlowerFleet for the aggregator, FlowerLink and device_key for a device.

Each is imported when it is asked for: a device needs no part of flwr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.flower.fleet import FlowerFleet
    from thinwire.flower.keys import device_key
    from thinwire.flower.stock.passing import stock_guests
    from thinwire.flower.transport import FlowerLink

__all__ = ["FlowerFleet", "FlowerLink", "device_key", "stock_guests"]

_WHERE = {"FlowerFleet": "fleet", "FlowerLink": "transport", "device_key": "keys", "stock_guests": "stock.passing"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.flower' has no attribute {name!r}")
    return getattr(import_module(f"thinwire.flower.{_WHERE[name]}"), name)
