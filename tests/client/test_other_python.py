"""`--python`: another interpreter trains, with numpy and torch and nothing of ours; old ones too."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.small_task import Aggregator
from tests.support.trained_elsewhere import TASK, Elsewhere
from thinwire.client import load_task
from thinwire.client.worker_process import MIN_PYTHON, OURS, Interpreter
from thinwire.core.errors import UsageError
from thinwire.core.types import ReplyHeader

COMPUTE = sorted((OURS / "client" / "train").glob("*.py"))
ADAPTERS = sorted((OURS / "client" / "adapters").glob("*.py"))
ABOVE = [OURS / "__init__.py", OURS / "client" / "__init__.py"]
NOT_THERE = ("thinwire.core", "pydantic", "cryptography", "flwr", "backports.zstd", "safetensors")
LOOKS = f"""
import importlib.util

def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False

print(sys.prefix, [name for name in {NOT_THERE} if there(name)])
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose packages are torch, and what torch needs: links to ours."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    not_linked = ("thinwire", "__editable__", "backports", *NOT_THERE)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(not_linked) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def test_it_has_nothing_of_ours_and_gives_the_same_bits(
    tmp_path: Path, other: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)  # in the task's own folder, as one would start it
    (tmp_path / "task.py").write_text(TASK + LOOKS)
    elsewhere = Elsewhere(tmp_path, python=other, threads=1)
    elsewhere.worker.describe()
    assert {"python", "numpy", "torch"} <= set(elsewhere.worker.versions)
    here = Aggregator(tmp_path / "here", load_task(elsewhere.spec), elsewhere.aggregator.plan)
    try:
        header, bundle = elsewhere.handler().handle(
            elsewhere.aggregator.assign(1), lambda: False, elsewhere.said.append
        )
    finally:
        elsewhere.worker.close()
    assert isinstance(header, ReplyHeader), header
    assert bundle is not None
    assert f"{other.parents[1]} []" in elsewhere.log
    expected, its_bundle = here.answer(here.handler(), here.assign(1))
    assert (header.metrics, header.norm, header.parts) == (expected.metrics, expected.norm, expected.parts)
    assert bundle.read_bytes() == its_bundle.read_bytes()


@pytest.mark.parametrize("path", [*COMPUTE, *ADAPTERS, *ABOVE], ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_what_it_imports_of_ours_is_python_3_8_and_imports_nothing_else(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=MIN_PYTHON)
    allowed = {*sys.stdlib_module_names, *(() if path in ABOVE else ("numpy", "torch"))}
    for node in imported(tree, inner=path not in ABOVE):
        if isinstance(node, ast.Import):
            assert {name.name.partition(".")[0] for name in node.names} <= allowed
        else:
            ours = node.level == 1 or (path in ADAPTERS and str(node.module).startswith("thinwire.client.train."))
            assert (ours and path not in ABOVE) or str(node.module).partition(".")[0] in allowed


def imported(tree: ast.AST, inner: bool) -> list[ast.Import | ast.ImportFrom]:
    """What is imported when it runs; `inner`: in functions too."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif inner or not isinstance(node, ast.FunctionDef):
            found += imported(node, inner)
    return found


def runs(python: str | Path) -> bool:
    return not subprocess.run([python, "-c", ""], check=False, capture_output=True, timeout=60).returncode


def test_the_oldest_python_says_what_it_lacks(tmp_path: Path) -> None:
    """Where there is one: what speaks with us runs on it, and it has no torch."""
    called = "python{}.{}".format(*MIN_PYTHON)
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*/bin/{called}"))  # where versions stand side by side
    found = [path for path in (*beside, shutil.which(called)) if path and runs(path)]
    if not found:
        pytest.skip(f"there is no {called} here")
    elsewhere = Elsewhere(tmp_path, python=Path(found[0]))
    if "torch" in elsewhere.worker.interpreter.versions:
        pytest.skip(f"this {called} has torch")
    with pytest.raises(UsageError, match="has no torch"):
        elsewhere.worker.describe()


@pytest.mark.parametrize(
    ("says", "text"),
    [('{"python": "3.7.16"}', "is Python 3.7.16"), ("hello", "does not run"), ("[3]", "does not run")],
)
def test_what_cannot_train_is_refused_in_words(tmp_path: Path, says: str, text: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o700)
    with pytest.raises(UsageError) as refused:
        _ = Interpreter(program, tmp_path).versions
    assert text in refused.value.what
