"""Flower's own check of its routes, made once a process: import this module before the first device API is made.

Flower's SuperLink looks at each of its hundred routes whenever an application of it is made, for two routes of one
name. That takes 0.07 s of CPU, nine tenths of what a device API of a test costs, and finds the same each time. The
application that is made here is checked, and those that follow have the same routes.
"""

from __future__ import annotations

from flwr.superlink import main

from thinwire.flower.link_state import SuperLink

SuperLink()
main.validate_unique_route_operation_ids = lambda fastapi_app: None
