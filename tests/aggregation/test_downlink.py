"""The model in the downlink: everyone at a version holds the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.codec_examples import made
from thinwire.aggregation import Downlink, ModelReplica, digest, read_model, write_model
from thinwire.aggregation.downlink import Announcement, changes_since, named_tensors, require_downlink
from thinwire.compression import Contractive, parse
from thinwire.core import Key, Layout, Part, Tensor
from thinwire.core.errors import BadPayload, CodecError, DataLost
from thinwire.core.types import Vector

LAYOUT = Layout.of({"a": (300,), "b": (500,), "c": (200,)})


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.core.layout.SEGMENT_FLOATS", 500)
    LAYOUT.__dict__.pop("segments", None)
    assert len(LAYOUT.segments) == 3


class Sender:
    """A server's end with its log, as server/model_store.py keeps it in files."""

    def __init__(self, spec: str, params: Vector, keep: int = 20) -> None:
        self.down, self.keep, self.log = Downlink(LAYOUT, spec, params), keep, dict[int, tuple[bytes, ...]]()

    def publish(self, params: Vector, full: bool = False) -> Announcement:
        news = self.down.publish(params, full)
        if news.changes:
            self.log[news.version] = news.changes
        self.log.pop(news.version - self.keep, None)
        return news

    def frames_for(self, held: int | None) -> list[tuple[str, bytes]]:
        sizes = {version: sum(map(len, changes)) for version, changes in self.log.items()}
        versions = changes_since(held, self.down.version, sizes, full=4 * LAYOUT.size)
        if versions is not None:
            return [(f"{v}/{i}", change) for v in versions for i, change in enumerate(self.log[v])]
        full = parse("identity").bind(LAYOUT)
        return [
            (f"full/{s.index}", full.encode(self.down.replica[s.span].copy(), {}, Key(0), s.index).payload)
            for s in LAYOUT.segments
        ]


@pytest.mark.parametrize("spec", ["identity", "topk(0.05) > int8", "topk(0.05) > int8 > zstd", "fp16", "drive"])
def test_every_device_holds_the_replicas_bits_whenever_it_comes(spec: str) -> None:
    params = made(1000, 0, "normal", 0)
    params[3] = -0.0
    down = Sender(spec, params, keep=5)
    always, seldom, absent = ModelReplica(LAYOUT, spec), ModelReplica(LAYOUT, spec), ModelReplica(LAYOUT, spec)
    for step in range(20):
        params = params + made(1000, step + 1, "normal", -4)
        news = down.publish(params)
        for device in [always] + [seldom] * (step % 3 == 0) + [absent] * (step in {0, 19}):
            device.apply(down.frames_for(device.version), news.version, news.digest)
            assert digest(device.params) == news.digest
    assert absent.version == 20
    assert np.abs(always.params - params).max() < 0.5  # what was left out came later


def test_changes_are_sent_where_they_are_shorter_and_still_known() -> None:
    params = made(1000, 0, "normal", 0)
    down = Sender("topk(0.05) > int8", params, keep=3)
    for step in range(5):
        params = params + made(1000, step, "normal", -4)
        down.publish(params)
    assert [name for name, _ in down.frames_for(4)] == ["5/0", "5/1", "5/2"]
    assert [name for name, _ in down.frames_for(2)] == [f"{v}/{i}" for v in (3, 4, 5) for i in range(3)]
    assert down.frames_for(5) == []
    for held in (None, 1, 9):
        assert [name for name, _ in down.frames_for(held)] == ["full/0", "full/1", "full/2"]


def test_a_full_version_makes_the_replica_the_model_itself() -> None:
    params = made(1000, 0, "normal", 0)
    down = Sender("topk(0.05) > int8", params)
    down.publish(params + 1)
    news = down.publish(params + 2, full=True)
    assert (news.digest, news.changes) == (digest(params + 2), ())
    assert [name for name, _ in down.frames_for(1)] == ["full/0", "full/1", "full/2"]


def test_changes_that_are_held_already_are_passed_over() -> None:
    params = made(1000, 0, "normal", 0)
    down, device = Sender("topk(0.05) > int8", params), ModelReplica(LAYOUT, "topk(0.05) > int8")
    for step in range(1, 4):
        news = down.publish(params + step)
        if step == 2:
            device.apply(down.frames_for(None), news.version, news.digest)
    device.apply(down.frames_for(0), news.version, news.digest)
    assert digest(device.params) == news.digest


def test_a_device_that_does_not_come_out_right_keeps_what_it_held_and_resyncs() -> None:
    params = made(1000, 0, "normal", 0)
    down, device = Sender("topk(0.05) > int8", params), ModelReplica(LAYOUT, "topk(0.05) > int8")
    first = down.publish(params)
    device.apply(down.frames_for(None), 1, first.digest)
    device.params[7] += 1
    held = digest(device.params)
    news = down.publish(params + 1)
    with pytest.raises(BadPayload, match="digest differs"):
        device.apply(down.frames_for(device.version), news.version, news.digest)
    assert (device.version, digest(device.params)) == (1, held)
    device.apply(down.frames_for(None), news.version, news.digest)
    assert digest(device.params) == news.digest


def test_changes_without_a_model_and_parts_of_no_segment_are_refused() -> None:
    down = Sender("topk(0.05) > int8", made(1000, 0, "normal", 0))
    news = down.publish(made(1000, 1, "normal", 0))
    changes = [(f"1/{i}", change) for i, change in enumerate(news.changes)]
    for frames in (changes, [("full/9", b"")], [("full/x", b"")], [("full/0", b"junk")], [("x/0", b"")]):
        with pytest.raises(BadPayload):
            ModelReplica(LAYOUT, "topk(0.05) > int8").apply(frames, 1, news.digest)


def test_the_identity_downlink_keeps_no_second_model() -> None:
    params = made(1000, 0, "normal", 0)
    down = Downlink(LAYOUT, "identity", params)
    assert down.publish(params).changes == ()
    assert down.replica is params


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("twobit(1.0)", "nothing is promised of one change"),
        ("powersgd(2)", "another BLAS"),
        ('layers("a"=powersgd(2); *=int8)', "another BLAS"),
    ],
)
def test_what_cannot_carry_it_is_refused_with_the_reason(spec: str, why: str) -> None:
    with pytest.raises(CodecError, match="cannot carry the downlink") as refused:
        require_downlink(spec)
    assert why in refused.value.why


def test_a_codec_that_does_not_contract_cannot_carry_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.compression.codecs.int8_qsgd_natural.Int8.kind", lambda self: Contractive(0.0))
    with pytest.raises(CodecError, match="cannot carry the downlink"):
        Downlink(LAYOUT, "int8", made(1000, 0, "normal", 0))


@pytest.mark.parametrize(
    "spec", ["qsgd(4)", "ternary", "randk(0.1)", "natural", "drive", "eden(2)", "eden(0.3)", "sign", "stc(0.1)"]
)
def test_the_replica_follows_a_model_that_stands_still(spec: str) -> None:
    """Also codecs that are unbiased by themselves: they encode the downlink as inside a residual."""
    target = made(1000, 1, "normal", 0)
    down = Downlink(LAYOUT, spec, made(1000, 0, "normal", 0))
    before = float(np.linalg.norm(target - down.replica))
    for _ in range(40):
        down.publish(target)
    assert np.linalg.norm(target - down.replica) < 0.5 * before


BUFFERED = Layout.build([Tensor("w", (900,)), Tensor("bn.running_mean", (4,), "float32", "buffer")])


def test_a_model_comes_back_from_its_file_bit_for_bit(tmp_path: Path) -> None:
    for layout, buffers in ((LAYOUT, []), (BUFFERED, [1.5, -0.0, 3e-30, -7])):
        params = made(layout.size, 1, "steep", 20)
        params[::7] = -0.0
        kept = np.array(buffers, np.float32)
        parts, stored = write_model(tmp_path / "m", layout, params, kept)
        back, own, read = read_model(tmp_path / "m", layout, parts)
        assert back.tobytes() == params.tobytes()
        assert own.tobytes() == kept.tobytes()
        assert read == stored == digest(params)
        body = (tmp_path / "m").read_bytes()
        assert len(body) == sum(part.length for part in parts)
        replica = ModelReplica(layout, "identity")
        at, named = 0, []
        for part in parts:
            if part.name != "buffers":
                named.append((part.name, body[at : at + part.length]))
            at += part.length
        assert replica.apply(named, 0, stored).tobytes() == params.tobytes()


def test_a_damaged_model_file_is_data_lost(tmp_path: Path) -> None:
    path = tmp_path / "m"
    params, buffers = made(900, 1, "normal", 0), np.ones(4, np.float32)
    parts, stored = write_model(path, BUFFERED, params, buffers)
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:100], b"", b"x" + whole[1:], whole[:-1] + b"x"):
        path.write_bytes(broken)
        with pytest.raises(DataLost):
            read_model(path, BUFFERED, parts)
    path.write_bytes(whole[:200] + b"xxxx" + whole[204:])
    assert read_model(path, BUFFERED, parts)[2] != stored
    with pytest.raises(DataLost):
        read_model(path, BUFFERED, [Part("full/0", 1, "")])


def test_a_disk_that_refuses_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataLost, match="cannot write"):
        write_model(tmp_path / "m", LAYOUT, made(1000, 0, "normal", 0), np.zeros(0, np.float32))
    assert list(tmp_path.iterdir()) == []


def test_writing_and_reading_a_model_takes_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    monkeypatch.setattr("thinwire.core.layout.SEGMENT_FLOATS", 2**20)
    layout = Layout.of({"a": (2**20,), "b": (2**20,)})
    params, none = np.ones(2**21, np.float32), np.zeros(0, np.float32)
    tracemalloc.start()
    parts, _ = write_model(tmp_path / "m", layout, params, none)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    read_model(tmp_path / "m", layout, parts)
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 2**20
    assert read < params.nbytes + 2**20


def test_a_models_tensors_have_the_values_shapes_and_names_of_the_state_dict() -> None:
    layout = Layout.of({"w": (2, 3), "b": (3,)})
    params = np.arange(layout.size, dtype=np.float32)
    found = named_tensors(layout, params, np.zeros(0, np.float32), {}, {})
    assert {name: values.tolist() for name, values in found.items()} == {"w": [[0, 1, 2], [3, 4, 5]], "b": [6, 7, 8]}
