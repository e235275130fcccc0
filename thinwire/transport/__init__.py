"""HTTPS transport between devices and the aggregator.

`protocol` holds what both ends share, `device` is the client's end, `server` the aggregator's end. The package needs
neither Flower nor torch, and a device imports nothing of `server`.
"""
