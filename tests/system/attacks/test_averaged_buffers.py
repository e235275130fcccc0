"""What devices say of float buffers comes through a real device API as the float32 that it was, plain and over TLS."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.system.attacks.acting import acted
from thinwire.aggregation import encode_buffers
from thinwire.core import Layout, Tensor
from thinwire.core.events import ModelStored
from thinwire.core.fleet import Delivery
from thinwire.core.types import Part, Reply, ReplyHeader
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, SyntheticUpdates

LAYOUT = Layout.build(
    [
        Tensor("w", (40,)),
        Tensor("constant", (4,), "float32", "buffer"),
        Tensor("bn.running_mean", (3,), "float32", "buffer"),
        Tensor("bn.running_var", (3,), "float32", "buffer"),
    ]
)
CONSTANT = [0.485, 1.7e9, 1e-30, -0.0]


@dataclass
class Sensing(SyntheticUpdates):
    """Sends these buffers behind its frames."""

    buffers: list[float] = field(default_factory=list)

    def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
        header, body = super().finish(delivery, behavior)
        if not isinstance(header, ReplyHeader) or not header.parts:
            return header, body
        sent = encode_buffers(LAYOUT, np.array(self.buffers, np.float32))
        part = Part("buffers", len(sent), hashlib.sha256(sent).hexdigest())
        return replace(header, parts=(*header.parts, part)), body + sent


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_statistics_of_large_and_small_features_are_averaged_in_float32(tmp_path: Path, tls: bool) -> None:
    said = {
        "pi-a": ([293.15, 101_325.0, 0.0012], [4.0, 2500.0, 1.04e-4], 40),
        "pi-b": ([295.85, 101_298.5, -0.0007], [4.2, 2410.0, 0.98e-4], 64),
        "pi-c": ([289.01, 101_377.25, 0.0001], [3.9, 2555.5, 1.01e-4], 200),
    }
    devices = {
        name: Sensing(name, LAYOUT, 0.01, examples, buffers=[*CONSTANT, *mean, *variance])
        for name, (mean, variance, examples) in said.items()
    }
    found = acted(tmp_path, LAYOUT, devices, tls=tls, run={"rounds": 2}, cohort={"max_weight": "none"})
    assert (found.row.status, found.row.version) == ("done", 2)
    last = found.of(ModelStored)[-1]
    _, buffers = Versions(found.home.run(found.row.run_id), LAYOUT).read(last)
    means, variances = (np.array([row[of] for row in said.values()], np.float32).astype(float) for of in (0, 1))
    weights = np.array([examples for _, _, examples in said.values()])
    mean = np.average(means, 0, weights)
    assert buffers[:4].tobytes() == np.array(CONSTANT, np.float32).tobytes()
    assert buffers[4:7] == pytest.approx(mean, rel=1e-6)
    assert buffers[7:] == pytest.approx(np.average(variances + (means - mean) ** 2, 0, weights), rel=1e-6)
