"""`pytest --thinwire-codec`: the codec of docs/how/your-own-codec.md keeps the laws, and one that lies is found out."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.fork_server import run_forked
from tests.support.processes import environment
from thinwire.conformance.plugin import specs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how" / "your-own-codec.md"
PLUGIN = "thinwire.conformance.plugin"


# A law that fails is not tried on ever smaller vectors: nobody looks at the smallest.
UNSHRUNK = """
from hypothesis import Phase, settings
settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
"""


@pytest.fixture
def mypkg(tmp_path: Path) -> Path:
    (tmp_path / "mypkg.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    (tmp_path / "conftest.py").write_text(UNSHRUNK)
    (tmp_path / "test_of_mine.py").write_text("def test_of_mine(): pass\n")
    return tmp_path / "mypkg.py"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *words]
    alone = {**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins take as long to import as pytest
    return run_forked(call, 240, cwd=folder, env=alone)


@pytest.mark.slow
def test_the_codec_of_the_how_to_keeps_the_laws_alone_and_in_chains(mypkg: Path) -> None:
    done = run(mypkg.parent, "--thinwire-codec", "mypkg:Cut", "-v")
    assert done.returncode == 0, done.stdout
    for spec in ("[cut]", "[cut > zstd]", "[topk(0.3) > cut]"):
        assert f"test_zero_stays_zero{spec} PASSED" in done.stdout
    assert "test_of_mine" not in done.stdout


def test_one_that_says_too_much_of_itself_fails_by_that_law(mypkg: Path) -> None:
    mypkg.write_text(mypkg.read_text().replace("Contractive(1 - 2**-14)", "Contractive(1.0)"))
    done = run(mypkg.parent, "--thinwire-codec", "mypkg:Cut", "-k", "keeps_within_its_kind or zero", "-x")
    assert done.returncode == 1
    assert "test_the_error_keeps_within_its_kind[cut]" in done.stdout


SENDS_NOTHING = """
    def dequantize(self, symbols, scales, span, word):
        return np.zeros(span.stop - span.start, np.float32)
"""


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        ("Contractive(1 / 4096)", "test_the_error_keeps_within_its_kind[cut]"),
        ("Unbiased(500.0)", "test_the_mean_of_many_encodings_is_the_vector[cut]"),
        ("NoGuarantee()", "test_under_feedback_the_sum_that_was_sent_follows_the_sum_that_was_given[cut]"),
    ],
)
def test_one_that_sends_nothing_fails_however_little_it_says_of_itself(mypkg: Path, kind: str, law: str) -> None:
    mine = mypkg.read_text().replace("Contractive(1 - 2**-14)", kind)
    mine = mine.replace("import Contractive", "import Contractive, NoGuarantee, Unbiased")
    mypkg.write_text(mine.rstrip() + "\n" + SENDS_NOTHING)
    laws = "keeps_within_its_kind or mean_of_many or sum_that_was_sent"
    done = run(mypkg.parent, "--thinwire-codec", "mypkg:Cut", "-k", laws, "-x")
    assert done.returncode == 1
    assert law in done.stdout


def test_paths_that_are_named_are_run_too_and_what_other_packages_brought_does_not_stand_in_the_way(
    mypkg: Path,
) -> None:
    info = mypkg.parent / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[thinwire.codecs]\ngone = other:Gone\n")
    done = run(mypkg.parent, "--thinwire-codec", "mypkg:Cut", "--collect-only", "-q", "test_of_mine.py")
    assert "test_zero_stays_zero[cut]" in done.stdout, done.stderr
    assert "test_of_mine" in done.stdout


def test_the_compressor_of_the_how_to_keeps_its_laws_behind_any_chain(mypkg: Path) -> None:
    mypkg.write_text(PAGE.read_text().split("```python\n")[2].split("```")[0])
    words = ["--thinwire-codec", "mypkg:Deflate", "-k", "compressed or canonical or broken or cut_anywhere"]
    done = run(mypkg.parent, *words, "-v")
    assert done.returncode == 0, done.stdout
    for spec in ("int8 > deflate", "identity > deflate", "topk(0.3) > sign > rice > deflate"):
        assert f"broken_frames_change_nothing_or_decode_to_numbers[{spec}] PASSED" in done.stdout, done.stdout
    mypkg.write_text(mypkg.read_text().replace("reader.decompress(data, most + 1)", "reader.decompress(data)[:most]"))
    done = run(mypkg.parent, "--thinwire-codec", "mypkg:Deflate", "-k", "compressed", "-x")
    assert done.returncode == 1, "it grows, and hides it"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("mypkg", "reads MODULE:CLASS"),
        ("nopkg:Cut", "does not import"),
        ("mypkg:Shut", "does not import"),
        ("mypkg:np", "no step of a chain"),
    ],
)
def test_what_is_no_codec_is_a_usage_error(mypkg: Path, named: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With which pytest ends as the test below has it end."""
    monkeypatch.syspath_prepend(mypkg.parent)
    with pytest.raises(pytest.UsageError, match=said):
        specs(named)
    sys.modules.pop("mypkg", None)


def test_a_compressor_that_cannot_decompress_is_told_what_it_lacks(mypkg: Path) -> None:
    mypkg.write_text(PAGE.read_text().split("```python\n")[2].split("    def decompress")[0])
    done = run(mypkg.parent, "--thinwire-codec", "mypkg:Deflate")
    assert done.returncode == 4
    assert "mypkg:Deflate has no decompress" in done.stderr


def test_pytest_finds_the_plugin_by_itself_where_thinwire_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
