"""200 versions of the model decode to equal digests, whichever way a device came to them, and by whichever kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.codec_examples import made
from thinwire.aggregation import ModelReplica, digest
from thinwire.client.payload import update_replica
from thinwire.compression import native
from thinwire.core import Layout, RunPlan, Tensor
from thinwire.core.types import Assignment
from thinwire.server.aggregator import Model
from thinwire.server.model_store import ModelDistributor, Versions
from thinwire.server.state.run_state import RunState

VERSIONS = 200
LAYOUT = Layout.build(
    [Tensor("a", (30, 40)), Tensor("b", (4100,)), Tensor("bn.running_mean", (4,), "float32", "buffer")]
)
CHAINS = ["topk(0.04) > sign > rice", "topk(0.05) > int8 > zstd", "qsgd(4)", "drive", 'layers("b"=fp16; *=topk(0.1))']


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("thinwire.core.layout.SEGMENT_FLOATS", 4000)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    LAYOUT.__dict__.pop("segments", None)
    yield
    LAYOUT.__dict__.pop("segments", None)


class Aggregator:
    """What of a run makes and sends versions; a restart builds it again from its files and its journal."""

    def __init__(self, folder: Path, spec: str) -> None:
        down = {"codec": spec, "log_rounds": 12, "full_every": 76}
        self.plan = RunPlan.from_json({"run": {"task": "t"}, "local": {"lr": 1}, "downlink": down})
        self.versions, self.run_state = Versions(folder, LAYOUT), RunState()
        self.model = Model(LAYOUT, made(LAYOUT.size, 0, "normal", 0), np.zeros(4, np.float32), {})
        self.run_state.apply(self.versions.write(0, self.model.params, self.model.buffers, {}, 0.0))
        self.restart()

    def restart(self) -> None:
        assert self.run_state.bases.model is not None
        self.model = Model(LAYOUT, *self.versions.read(self.run_state.bases.model), {})
        self.sending = ModelDistributor(self.plan, self.versions, self.run_state, self.model)

    def step(self, version: int) -> str:
        """Another version; gives the digest that devices are to hold."""
        self.model.params = self.model.params + made(LAYOUT.size, version, "normal", -4)
        self.model.buffers = np.full(4, version, np.float32)
        stored = self.versions.write(version, self.model.params, self.model.buffers, {}, 0.0)
        for event in (stored, *self.sending.publish(version, 0.0)):
            self.run_state.apply(event)
        self.versions.prune([version], [version], range(version - 11, version + 1))
        return self.run_state.bases.newest.digest

    def bring(self, device: str, replica: ModelReplica) -> tuple[str, ...]:
        """Bring a device to the newest version; gives the names of the parts that it took."""
        if replica.version is not None:
            self.run_state.bases.held[device] = replica.version
        payload = self.sending.payload_for(device)
        base = self.run_state.bases.newest
        assignment = Assignment(
            "x", "r", "t", "train", {}, base_version=base.version, base_digest=base.digest, parts=payload.parts
        )
        buffers = update_replica(assignment, self.sending.bundle(payload), replica)
        assert buffers is not None
        assert buffers[0] == base.version
        return tuple(part.name for part in payload.parts)


@pytest.mark.parametrize("spec", CHAINS)
def test_200_versions_decode_to_equal_digests_on_every_path(tmp_path: Path, spec: str) -> None:
    """One by one through the log, through gaps, in full, and after restarts of either end; numpy and each kernel."""
    aggregator, paths = Aggregator(tmp_path, spec), native.available()
    every = {"one-by-one": 1, "gaps": 7, "behind": 23, "far": 80}
    devices = {name: ModelReplica(LAYOUT, spec) for name in every}
    taken: dict[str, list[tuple[str, ...]]] = {name: [] for name in every}
    for version in range(1, VERSIONS + 1):
        with native.using(paths[version % len(paths)]):
            expected = aggregator.step(version)
        if version % 25 == 0:
            aggregator.restart()
        for at, (name, gap) in enumerate(every.items()):
            if version % gap and version != VERSIONS:
                continue
            with native.using(paths[(version // 7 + at) % len(paths)]):
                taken[name].append(aggregator.bring(name, devices[name]))
            assert digest(devices[name].params) == expected
            held = devices[name]
            if version % 20 == 0:
                assert aggregator.bring(name, held) == ("buffers",), "the rest of it is held"
            if version % 5 == 0:  # its process ends: what it holds comes from its disk
                devices[name] = ModelReplica(LAYOUT, spec, held.params.copy(), held.version)
    assert len({digest(device.params) for device in devices.values()}) == 1
    assert len(taken["one-by-one"]) == VERSIONS
    assert len(list(tmp_path.iterdir())) < 12 + 8, "files that nobody needs any more are removed"
    in_full = {name: sum(parts[0].startswith("full/") for parts in found) for name, found in taken.items()}
    assert in_full["one-by-one"] == 3, "at first, and at each full version"
    assert len(taken["gaps"]) > in_full["gaps"] or spec == 'layers("b"=fp16; *=topk(0.1))'
    assert in_full["behind"] == len(taken["behind"]), "the log was cut"


@pytest.mark.parametrize("other", [lambda right: bytes(len(right)), lambda right: right + b"x"], ids=["bytes", "size"])
def test_a_bundle_that_an_earlier_process_left_is_sent_only_if_it_has_the_parts(
    tmp_path: Path, other: Callable[[bytes], bytes]
) -> None:
    """A backup may hold one of a version that was made after its database was copied, and is made again."""
    aggregator, replica = Aggregator(tmp_path, "qsgd(4)"), ModelReplica(LAYOUT, "qsgd(4)")
    aggregator.step(1)
    aggregator.bring("pi-01", replica)
    aggregator.step(2)
    aggregator.step(3)
    aggregator.run_state.bases.held["pi-01"] = 1
    path = aggregator.sending.bundle(aggregator.sending.payload_for("pi-01"))
    assert path is not None
    assert path.suffix not in (".model", ".replica", ".change"), "the parts of several files"
    right = path.read_bytes()
    path.write_bytes(other(right))
    aggregator.restart()
    assert aggregator.sending.bundle(aggregator.sending.payload_for("pi-01")) == path
    assert path.read_bytes() == right
