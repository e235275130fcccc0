"""A new codec is one file: its class declares what the laws, the registry, docs, benchmarks and plan rules read.

The file is of another package, or a built-in one. Here it is `examples/own_codec/spin.py`, which rotates and has no
kernel.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.codecs_elsewhere import install
from thinwire.compression.base import Quantizer
from thinwire.compression.codecs import stages_of

ROOT = Path(__file__).parents[2]
SPIN = (ROOT / "examples/own_codec/spin.py").read_text()
ASK = """
import contextlib, io, json
from benchmarks.codecs import SPECS
from docs.generate.codecs import codecs_page
from thinwire.aggregation import codecs
from thinwire.cli.main import main
from thinwire.core.plan import RunPlan

def refusal(uplink):
    plan = RunPlan.parse(f'[run]\\ntask = "toy"\\n[local]\\nlr = 1\\n[uplink]\\n{uplink}')
    return " ".join(f"{one.what} {one.why} {one.hint}" for one in plan.check(codecs))

with contextlib.redirect_stdout(io.StringIO()) as listed:
    main(["codecs", "--json"])
print(json.dumps({
    "listed": json.loads(listed.getvalue()),
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


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with what is compiled of it, whose folder of codecs has one file more."""
    folder = tmp_path_factory.mktemp("built_in")
    for name in ("thinwire", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*_cache"))
    shutil.copy(ROOT / "README.md", folder)
    (folder / CODEC).write_text(SPIN)
    return folder


CODEC = "thinwire/compression/codecs/spin.py"


# In one process, which imports once what each of the two does.
WRITE = """
import docs.generate.__main__
import tests.compression.write_golden
tests.compression.write_golden.main()
docs.generate.__main__.main()
print(tests.compression.write_golden.SPECS)
"""
LAWS = "(within_its_kind or mean_of_many or canonical) and spin]"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but compiled Python."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def run(folder: Path, *words: str) -> str:
    # The plugins of other packages take as long to import as pytest.
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    call = [sys.executable, *words]
    done = subprocess.run(call, cwd=folder, text=True, capture_output=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_codec_that_rotates_keeps_the_laws_because_its_class_says_that_it_rotates(package: Path) -> None:
    run(package, "-m", "pytest", "-p", "thinwire.conformance.plugin", "-p", "no:cacheprovider", "-q", "-k", LAWS,
        "--thinwire-codec", "mypkg:Spin")  # fmt: skip


@pytest.mark.parametrize("place", ["package", "built_in"])
def test_the_list_the_docs_the_benchmark_and_the_rules_of_plans_take_it_up(
    place: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(place)
    found = json.loads(run(folder, "-c", ASK))
    rows = {row["name"]: row for row in found["listed"]}
    assert rows["spin"]["paper"] == "Somebody et al. 2026"
    assert rows["spin"]["kind"] == "unbiased, omega 0.327"
    assert (str(folder) in found["from"]) == (place == "built_in")
    assert found["timed"]
    assert len(found["page"]) == 1
    assert "Somebody et al. 2026" in found["page"][0]
    assert found["alone"] == ""
    assert found["ladder"] == ""
    assert "spin" in found["larger"]
    assert "powersgd(2) > fp16" in found["low rank"]


@pytest.mark.slow
def test_a_built_in_one_changes_its_golden_files_and_the_reference_page_and_no_other_file(built_in: Path) -> None:
    before = contents(built_in)
    tested = ast.literal_eval(run(built_in, "-c", WRITE))
    assert {"spin", "topk(0.3) > spin"} <= set(tested), "the laws run on every spec of this list"
    after = contents(built_in)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {
        "docs/reference/codecs.md",
        *(f"tests/golden/frames/{name}.{kind}" for name in ("spin", "topk-0.3-spin") for kind in ("f4", "frame")),
    }
    before_page, page = (files["docs/reference/codecs.md"].decode().splitlines() for files in (before, after))
    (row,) = (line for line in page if line not in before_page)
    assert row.startswith("| `spin` |")
    assert [line for line in page if line != row] == before_page


def test_a_second_file_of_the_same_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rotated_qsgd\.py both hold the stage 'qsgd'"):
        stages_of(["int8_qsgd_natural", "rotated_qsgd"])


def test_a_quantizer_that_rotates_must_be_seeded() -> None:
    with pytest.raises(TypeError, match="Unseeded rotates, so it must be seeded"):
        type("Unseeded", (Quantizer,), {"rotates": True})
