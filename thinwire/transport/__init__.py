"""Flower as the engine: FlowerFleet for the aggregator, FlowerLink and device_key for a device.

`wire` is what both ends say alike, `device` one end, `door` and behind it `lane` the other one; `stock` is for
Flower's own nodes and apps. Each name is imported when it is asked for: a device needs no part of flwr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.transport.device.identity import device_key
    from thinwire.transport.device.link import FlowerLink

__all__ = ["FlowerLink", "device_key"]

_WHERE = {
    "FlowerLink": "thinwire.transport.device.link",
    "device_key": "thinwire.transport.device.identity",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.transport' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
