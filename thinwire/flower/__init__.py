"""Flower as the engine: FlowerFleet for the aggregator, FlowerLink and device_key for a device.

`wire` is what both ends say alike, `device` one end, `door` and behind it `lane` the other one; `stock` is for
Flower's own nodes and apps. Each name is imported when it is asked for: a device needs no part of flwr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.flower.device.keys import device_key
    from thinwire.flower.device.transport import FlowerLink
    from thinwire.flower.fleet import FlowerFleet
    from thinwire.flower.stock.passing import stock_guests

__all__ = ["FlowerFleet", "FlowerLink", "device_key", "stock_guests"]

_WHERE = {
    "FlowerFleet": "fleet",
    "FlowerLink": "device.transport",
    "device_key": "device.keys",
    "stock_guests": "stock.passing",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.flower' has no attribute {name!r}")
    return getattr(import_module(f"thinwire.flower.{_WHERE[name]}"), name)
