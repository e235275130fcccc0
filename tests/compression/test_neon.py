"""NEON's kernels on a machine that has none: compiled for 64-bit ARM, run by qemu, and held against the scalar ones,
which are held against golden files.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compression.write_golden import FOLDER
from thinwire.compression import frame
from thinwire.core import Key
from thinwire.core.prng import word32

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tests/compression/same.cpp"
FLAGS = ["-std=c++17", "-Wno-psabi", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]  # as in setup.py
WORD = word32(Key(1, 2), "int8", 0)  # what the golden int8 was drawn by
STREAMS = {"bf16": 1, "fp16": 2, "sign": 2, "int8": 2}
HERE, ARM, QEMU = "g++", "aarch64-linux-gnu-g++", "qemu-aarch64-static"


def printed(compiler: str, path: str, optimized: str, into: Path, *run: str) -> list[str]:
    """What the harness prints on this path."""
    program = into / path
    sources = ["-I", str(ROOT / "csrc"), str(HARNESS)]
    said = [optimized, "-static", f"-DTW_PATH={path}", f"-DTW_WORD={WORD}u"]
    subprocess.run([compiler, *FLAGS, *said, *sources, "-o", program], check=True)
    return subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if shutil.which(HERE) is None:
        pytest.skip("apt-get install g++")
    return printed(HERE, "scalar", "-O0", tmp_path_factory.mktemp("scalar"))


def check_sum(data: bytes | memoryview) -> int:
    """FNV-1a, as in the harness."""
    total = 2166136261
    for byte in bytes(data):
        total = (total ^ byte) * 16777619 & 0xFFFFFFFF
    return total


def test_the_harness_gives_the_golden_bytes_on_the_scalar_path(scalar: list[str]) -> None:
    """So NEON, held against it below, does too."""
    expected = []
    for name, count in STREAMS.items():
        payload = (FOLDER / f"{name}.frame").read_bytes()
        streams = frame.unpack(payload, payload[3 : 3 + frame.HASH_BYTES], count)
        expected += [f"golden {name} {place} {check_sum(one.data):08x}" for place, one in enumerate(streams)]
    assert [line for line in scalar if line.startswith("golden")] == expected


@pytest.mark.skipif(
    not all(map(shutil.which, (ARM, QEMU))), reason="apt-get install g++-aarch64-linux-gnu qemu-user-static"
)
def test_neon_gives_what_the_scalar_path_gives(tmp_path: Path, scalar: list[str]) -> None:
    assert printed(ARM, "neon", "-O2", tmp_path, QEMU) == scalar
    assert len(scalar) > 1000


def test_the_harness_calls_every_kernel_of_values() -> None:
    """Those of places and streams work on whole numbers, in the same code on every path but AVX-512.

    tests/compression/test_rans.py holds its rows of `rans` against numpy.
    """
    sources = "".join(path.read_text() for path in (ROOT / "csrc").glob("*.hpp"))
    kernels = set(re.findall(r"TW_EXPORT \w+ TW\((\w+)\)", sources))
    called = set(re.findall(r"TW\((\w+)\)\(", HARNESS.read_text()))
    assert {name for name in kernels - called if not name.startswith(("delta", "rans", "rice"))} == set()
