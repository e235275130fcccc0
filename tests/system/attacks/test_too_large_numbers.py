"""A device whose frames are legal and whose numbers no model can hold: the run ends with the others' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.normed import NORMED, Normed
from tests.system.attacks.acting import acted
from thinwire.core.events import ModelStored, RoundClosed, UpdateDropped
from thinwire.server.model_store import Versions

LIES: dict[str, dict[str, Any]] = {
    "update": {"update": 3e38, "examples": 1},
    "mean": {"mean": 3e38},
    "variance": {"variance": -1.0},
    "counter": {"counters": {"bn.num_batches_tracked": 2**63 - 1}},
}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_devices_with_too_large_numbers_end_no_run_and_are_in_no_model(tmp_path: Path, tls: bool) -> None:
    liars = {name: Normed(name, NORMED, **{"update": 1.0, **lie}) for name, lie in LIES.items()}
    devices = {**liars, "honest": Normed("honest", NORMED, 1.0)}
    made = acted(tmp_path, NORMED, devices, tls=tls, run={"rounds": 2}, cohort={"min_updates": 1})
    assert made.row.status == "done", made.row.status_text
    assert sorted(e.device for e in made.of(UpdateDropped)) == sorted([*liars, *liars])
    assert {len(e.aggregated) for e in made.of(RoundClosed)} == {1}
    versions = Versions(made.home.run(made.row.run_id), NORMED)
    params, buffers = versions.read(made.of(ModelStored)[-1])
    assert np.array_equal(params, np.full(NORMED.size, 2.0, np.float32))
    assert np.array_equal(buffers, np.array([0.5] * 3 + [1.0] * 3, np.float32))
