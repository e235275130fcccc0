"""A new codec is one file: its class declares what the laws, the list, docs, benchmarks and plan rules read.

The file is of another package, or a built-in one: then nothing but the folder `codecs/` lists it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.codecs_elsewhere import install

ROOT = Path(__file__).parents[2]
SPIN = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.compression.base import Quantizer, Unbiased
from thinwire.compression.codecs.drive_eden import Eden
from thinwire.core.errors import BadPayload

INNER = Eden(3)


@dataclass(frozen=True)
class Spin(Quantizer):
    """Rotates at random and sends eight levels, without a kernel."""

    examples: ClassVar[tuple[str, ...]] = ("spin",)
    paper: ClassVar[str] = "Somebody et al. 2026"
    rotates: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    spec: ClassVar[str] = "spin"
    bits: ClassVar[int] = 3
    scales_dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    def kind(self):
        return Unbiased(INNER.omega)

    def scales_count(self, size):
        return INNER.scales_count(size)

    def quantize(self, values, word):
        return INNER._quantize(values, word)

    def dequantize(self, symbols, scales, span, word):
        return INNER.dequantize(symbols[0 : symbols.size], scales, span, word)

    def check(self, symbols, scales):
        INNER.check(symbols[0 : symbols.size], scales)
'''
ASK = """
import json
from benchmarks.codecs import SPECS
from docs.generate.codecs import codecs_page
from thinwire.aggregation import codecs
from thinwire.core.plan import RunPlan

def refusal(uplink):
    plan = RunPlan.parse(f'[run]\\ntask = "toy"\\n[local]\\nlr = 1\\n[uplink]\\n{uplink}')
    return " ".join(f"{one.what} {one.why} {one.hint}" for one in plan.check(codecs))

print(json.dumps({
    "timed": "spin" in SPECS,
    "from": __import__("thinwire").__file__,
    "page": [line for line in codecs_page().splitlines() if "`spin`" in line],
    "alone": refusal("codec = 'topk(0.1) > spin > rice'"),
    "ladder": refusal("ladder = ['int8', 'spin']"),
    "larger": refusal("ladder = ['spin', 'int8']"),
    "low rank": refusal("codec = 'powersgd(2) > spin'"),
}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder in which a package is installed that brings `spin`, a codec that rotates and has no kernel."""
    install(tmp_path, SPIN, "thinwire.codecs", "spin = mypkg:Spin")
    return tmp_path


@pytest.fixture
def built_in(tmp_path: Path) -> Path:
    """A folder with a copy of Thinwire, whose folder of codecs has one file more."""
    shutil.copytree(ROOT / "thinwire", tmp_path / "thinwire", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "thinwire/compression/codecs/spin.py").write_text(SPIN)
    return tmp_path


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    call = [sys.executable, *words]
    done = subprocess.run(call, cwd=folder, text=True, capture_output=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_codec_that_rotates_keeps_the_laws_because_its_class_says_that_it_rotates(package: Path) -> None:
    laws = "(within_its_kind or mean_of_many or canonical) and spin]"
    run(package, "-m", "pytest", "-p", "thinwire.conformance.plugin", "-p", "no:cacheprovider", "-q", "-k", laws,
        "--thinwire-codec", "mypkg:Spin")  # fmt: skip


@pytest.mark.parametrize("place", ["package", "built_in"])
def test_the_list_the_docs_the_benchmark_and_the_rules_of_plans_take_it_up(
    place: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(place)
    rows = {row["name"]: row for row in json.loads(run(folder, "-m", "thinwire.cli", "codecs", "--json"))}
    assert rows["spin"]["paper"] == "Somebody et al. 2026"
    assert rows["spin"]["kind"] == "unbiased, omega 0.0358"
    found = json.loads(run(folder, "-c", ASK))
    assert (str(folder) in found["from"]) == (place == "built_in")
    assert found["timed"]
    assert len(found["page"]) == 1
    assert "Somebody et al. 2026" in found["page"][0]
    assert found["alone"] == ""
    assert found["ladder"] == ""
    assert "spin" in found["larger"]
    assert "powersgd(2) > fp16" in found["low rank"]


@pytest.mark.slow
def test_a_built_in_one_keeps_the_laws_and_has_its_golden_files_written_without_being_listed(built_in: Path) -> None:
    shutil.copytree(ROOT / "tests", built_in / "tests", ignore=shutil.ignore_patterns("__pycache__", "store", "cli"))
    frames = {file.name: file.read_bytes() for file in (built_in / "tests/golden/frames").iterdir()}
    run(built_in, "-m", "tests.compression.write_golden")
    written = {file.name: file.read_bytes() for file in (built_in / "tests/golden/frames").iterdir()}
    assert sorted(set(written) - set(frames)) == ["spin.f4", "spin.frame"]
    assert frames.items() <= written.items()
    laws = "(within_its_kind or mean_of_many or canonical) and spin]"
    run(built_in, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", laws, "tests/compression/test_codec_laws.py")
