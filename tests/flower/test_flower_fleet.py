"""FlowerFleet keeps the laws of a fleet, over real sockets."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.fleet_laws import FleetLaws
from tests.flower.doubles import place


class TestFlowerFleet(FleetLaws):
    def make(self, folder: Path) -> AbstractContextManager[Any]:
        return place(folder)
