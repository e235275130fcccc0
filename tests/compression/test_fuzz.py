"""240 hostile frames a decoder, always the same ones; `make fuzz` has 100 000, under the sanitizers."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.compression.fuzz import fuzz
from tests.support.codec_examples import SPECS, made
from tests.support.hostile_frames import ONE, WHOLE, bombs, target
from tests.support.hostile_lanes import LANES, LATTICE
from tests.support.hostile_streams import LONG_STREAMS
from tests.support.phase_messages import MESSAGES
from thinwire.aggregation import ModelReplica, digest, read_model, write_model
from thinwire.compression import parse
from thinwire.compression.chain import Chain
from thinwire.compression.spec import chains
from thinwire.core import Key, Layout, Tensor
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.types import Vector

ROOT = Path(__file__).parents[2]
FRAMES = 160
PAST_THE_END = """
import numpy as np
from thinwire.compression.native import symbol
out = np.empty(3, np.int8)
symbol("unpack", "scalar")(np.zeros(9, np.uint8).ctypes.data, 30, 2, out.ctypes.data)
print("went on")
"""


@pytest.mark.parametrize("spec", [*SPECS, LANES, LATTICE, MESSAGES])
def test_hundreds_of_hostile_frames_are_refused_or_decode_alike_on_two_paths(spec: str) -> None:
    assert FRAMES // 4 < fuzz(spec, FRAMES) < FRAMES


def test_long_hostile_streams_are_refused_or_decode_alike_on_two_paths() -> None:
    assert 8 < fuzz(LONG_STREAMS, 24) < 24


@pytest.mark.parametrize("spec", SPECS)
def test_a_hostile_frame_is_refused_before_memory_is_taken(spec: str) -> None:
    """What a refusal takes goes by the frame that came, not by what it says, nor by the vector it would fill."""
    to, rng = target(spec, 50_000), random.Random(5)
    bombs()
    compressed = any(chain.coded.last for chain in chains(parse(spec)) if isinstance(chain, Chain))
    grown = 12 * to.codec.max_bytes() if compressed else 0  # a compressed stream may be as long as a legal one
    for _ in range(40):
        payload = to.hostile(rng)
        tracemalloc.start()
        try:
            to.codec.check(payload)
        except BadPayload:
            # A bit may stand for a place: numpy holds four numbers of 8 bytes for each while it reads them.
            assert tracemalloc.get_traced_memory()[1] < 60_000 + 256 * min(len(payload), to.codec.max_bytes()) + grown
        finally:
            tracemalloc.stop()


REPLICA_CODEC = "topk(0.1) > int8 > rice"
NAMES = [
    "full/0",
    "1/0",
    "2/0",
    "full/1",
    "full/-1",
    "full/",
    "/0",
    "x/0",
    "1/00",
    "9/0",
    "",
    "full",
    "1/0/0",
    "1/" + "9" * 5000,
]
NAMES += ["9" * 5000 + "/0", "²/0", "full/²", "٣/0", "full/٠"]


def test_a_device_keeps_its_model_whatever_it_is_sent_down() -> None:
    to, rng = target(REPLICA_CODEC, 300), random.Random(11)
    layout, right = to.codec.layout, to.frames[0]
    full = target_of("identity", layout)
    for number in range(FRAMES):
        replica = ModelReplica(layout, REPLICA_CODEC)
        replica.apply([("full/0", full[0])], 1, digest(full[1]))
        held = replica.params.tobytes()
        frames = [
            (rng.choice(NAMES), rng.choice([to.hostile(rng), full[0], right, b""])) for _ in range(rng.randrange(1, 4))
        ]
        with pytest.raises(BadPayload):
            replica.apply(frames, 2, "0" * 64)
        assert (replica.version, replica.params.tobytes()) == (1, held), number


def target_of(spec: str, layout: Layout) -> tuple[bytes, Vector]:
    x = made(layout.size, 1, "normal", 0)
    codec = parse(spec).bind(layout)
    return bytes(codec.encode(x, codec.init(), Key(1)).payload), x


def test_a_model_file_that_somebody_broke_is_data_lost_or_a_model(tmp_path: Path) -> None:
    layout = Layout.build([Tensor("w", (40, 5)), Tensor("b.running_mean", (7,), role="buffer")])
    rng, path = random.Random(12), tmp_path / "model"
    parts, _ = write_model(path, layout, made(200, 1, "normal", 0), made(7, 1, "normal", 0))
    right, lost = path.read_bytes(), 0
    for _ in range(FRAMES):
        broken = bytearray(right)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        cut = rng.choice([len(broken), len(broken), rng.randrange(len(broken))])
        path.write_bytes(bytes(broken[:cut]))
        try:
            params, buffers, found = read_model(path, layout, parts)
        except DataLost:
            lost += 1
        else:
            assert (params.size, buffers.size, found) == (200, 7, digest(params))
    assert lost > FRAMES // 3


def test_every_kind_of_harm_is_done() -> None:
    """A kind that is written and not registered would prove nothing."""
    from tests.support import hostile_frames

    said = {f.__name__ for f in (*WHOLE, *ONE)}
    assert said >= {"flipped", "truncated", "oversized", "foreign", "claimed", "bomb", "padded", "odd_places"}
    assert all(callable(getattr(hostile_frames, name)) for name in said)


@pytest.mark.slow
def test_the_sanitizers_end_a_kernel_that_writes_past_an_array(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("g++ has no libasan here")
    alone = tmp_path / "g++"  # knows no other instruction set: the scalar path is built alone, in a quarter of the time
    alone.write_text(f'#!/bin/sh\ncase "$*" in *-mavx*) exit 1;; esac\nexec {compiler} "$@"\n')
    alone.chmod(0o755)
    command = [str(ROOT / "tests/compression/sanitized.sh"), sys.executable, "-c", PAST_THE_END]
    env = {**os.environ, "CXX": str(alone), "THINWIRE_OPTIMIZED": "-O0"}  # in a third of what is left
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=env)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
    assert "went on" not in done.stdout


def test_no_kernel_allocates() -> None:
    """So nothing can leak, and `make fuzz` need not look for leaks."""
    for path in (ROOT / "csrc").iterdir():
        text = path.read_text()
        assert not re.search(r"\b(malloc|calloc|realloc|new|std::vector|std::string)\b", text), path.name
