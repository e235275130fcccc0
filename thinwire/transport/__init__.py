"""HTTPS transport between devices and the aggregator.

`protocol` holds what both ends share, `device` is the client's end, `server` the aggregator's end. The package needs
neither Flower nor torch. Each name is imported at its first use, so that a device imports nothing of the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.transport.device.identity import device_key
    from thinwire.transport.device.link import HttpsLink

__all__ = ["HttpsLink", "device_key"]

_WHERE = {
    "HttpsLink": "thinwire.transport.device.link",
    "device_key": "thinwire.transport.device.identity",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.transport' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
