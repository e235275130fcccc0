"""A task is found, checked and described; what is wrong with it is said with its place."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.small_task import task_of
from thinwire.client import load_task
from thinwire.client.task import as_task, initial_model
from thinwire.client.task import report as described
from thinwire.core.errors import TaskError, UsageError

WHOLE = "__version__ = '7'\ndef model(): ...\ndef data(client): ...\ndef loss(model, batch): ...\n"


def written(folder: Path, text: str, name: str = "task.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(spec: str) -> TaskError:
    with pytest.raises(TaskError) as caught:
        load_task(spec)
    assert caught.value.exit_code == 3
    assert caught.value.why
    assert caught.value.hint
    return caught.value


def test_a_file_is_loaded_with_version_and_source_digest(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    task = load_task(f"mine={path}")
    assert (task.name, task.version) == ("mine", "7")
    assert task.source_digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_stands_beside_a_file_can_be_imported(tmp_path: Path) -> None:
    written(tmp_path, "def loss(model, batch): ...\n", "beside_the_task.py")
    path = written(tmp_path, "from beside_the_task import loss\ndef model(): ...\ndef data(client): ...\n")
    assert load_task(f"mine={path}").module.loss.__module__ == "beside_the_task"


def test_an_object_in_a_module_can_be_a_task(tmp_path: Path) -> None:
    body = "".join(f"    {line}\n" for line in WHOLE.splitlines())
    path = written(tmp_path, f"class Mine:\n{body}mine = Mine\n")
    assert load_task(f"x={path}:mine").version == "7"
    assert "'other'" in refused(f"x={path}:other").what


def test_a_file_that_is_no_python_code_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE, "task.txt")
    found = refused(f"x={path}")
    assert (found.what, found.why, found.hint) == (
        f"cannot import the task {path}",
        "it is not Python code",
        "a .py file",
    )


def test_a_dotted_name_is_imported() -> None:
    assert refused("x=json.decoder").what.endswith("it has no model, data, loss")


def test_a_folder_is_the_task_in_it_also_without_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.py").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    assert load_task("mine=mine").source_digest == load_task("mine=mine/").source_digest != ""


@pytest.mark.parametrize("spec", ["digits", "=x.py", "a b=x.py", "digits="])
def test_a_spec_that_is_no_pair_is_a_usage_error(spec: str) -> None:
    with pytest.raises(UsageError):
        load_task(spec)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.py") in refused(f"x={tmp_path / 'none.py'}").why


def test_a_module_that_is_not_there_is_refused() -> None:
    assert "no_such_module_anywhere" in refused("x=no_such_module_anywhere").what


def test_a_missing_dependency_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    assert "install no_such_package" in refused(f"x={written(tmp_path, 'import no_such_package.part')}").hint


def test_code_that_raises_at_import_is_placed(tmp_path: Path) -> None:
    path = written(tmp_path, "a = 1\na / 0")
    assert "ZeroDivisionError at task.py:2" in refused(f"x={path}").why


def test_a_syntax_error_is_placed(tmp_path: Path) -> None:
    path = written(tmp_path, "a = 1\nb = (")
    assert "SyntaxError at task.py:2" in refused(f"x={path}").why


def test_a_module_that_lacks_functions_is_told_which(tmp_path: Path) -> None:
    path = written(tmp_path, "def model(): ...\nloss = 3\n")
    error = refused(f"x={path}")
    assert "it has no data, loss" in error.what
    assert "data(client)" in error.why


def test_a_report_says_what_is_installed() -> None:
    report = described(task_of())
    assert (report.name, report.error, len(report.layout_digest)) == ("small", "", 64)
    assert {"topk", "int8", "zstd"} <= set(report.codecs)


def test_a_report_of_broken_code_gives_the_place_and_no_text(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE.replace("model(): ...", "model():\n    raise ValueError('secret 42')"))
    report = described(load_task(f"x={path}"))
    assert report.error == "ValueError at task.py:3"


def test_a_model_that_is_no_module_is_refused() -> None:
    none: Any = lambda: None  # noqa: E731 -- what no type checker would let pass
    raising: Any = lambda: 1 / 0  # noqa: E731 -- as above
    with pytest.raises(TaskError, match="gave None"):
        initial_model(task_of(none), 1)
    with pytest.raises(TaskError, match="raised ZeroDivisionError"):
        initial_model(task_of(raising), 1)


def test_an_object_without_functions_is_no_task() -> None:
    with pytest.raises(TaskError, match="it has no loss"):
        as_task("x", SimpleNamespace(model=print, data=print))


def test_loading_a_task_imports_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    code = (
        f"import sys; from thinwire.client import load_task; load_task('x={path}'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
