"""A device that says it counts a thousand million times is dropped, or counts ten medians, and the round says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.server_bench import LAYOUT
from tests.system.attacks.acting import acted
from thinwire.core.events import ModelStored, RoundClosed, UpdateDropped
from thinwire.core.fleet import Delivery
from thinwire.core.serialization import MAX_EXAMPLES
from thinwire.core.types import Reply, ReplyHeader
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, SyntheticUpdates


@dataclass
class Boasting(SyntheticUpdates):
    """Divides its change by a normaliser of its own."""

    a: float = 0.0

    def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
        header, body = super().finish(delivery, behavior)
        assert isinstance(header, ReplyHeader)
        return (replace(header, a=self.a) if self.a and header.parts else header), body


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_no_device_owns_the_mean(tmp_path: Path, tls: bool) -> None:
    devices: dict[str, SyntheticUpdates] = {name: SyntheticUpdates(name, LAYOUT, 1.0) for name in ("b", "c", "d")}
    devices |= {
        "many": SyntheticUpdates("many", LAYOUT, -1.0, examples=MAX_EXAMPLES),
        "large": Boasting("large", LAYOUT, -1.0, a=1e9),
    }
    made = acted(tmp_path, LAYOUT, devices, tls=tls, run={"rounds": 1}, local={"lr": 1.0, "steps": 1})
    assert made.row.status == "done", made.row.status_text
    assert [(e.device, e.detail) for e in made.of(UpdateDropped)] == [
        ("large", "an update with a = 1e+09 (1 steps come to at most 1)")
    ]
    ((update_id, capped),) = made.of(RoundClosed)[0].capped.items()
    assert update_id.split("/")[1] == "many"
    assert capped == {"examples": MAX_EXAMPLES, "counted": 100, "median": 10.0}
    params, _ = Versions(made.home.run(made.row.run_id), LAYOUT).read(made.of(ModelStored)[-1])
    assert np.allclose(params, (3 * 10 - 100) / 130)
