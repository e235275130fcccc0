"""The example notebook runs from top to bottom in a real kernel, and a run that was killed goes on in the next one."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook" / "digits.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages: they warn of each other


def test_the_example_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE.parents[2]))
    found = NotebookClient(nbformat.read(EXAMPLE, as_version=4), timeout=300).execute()
    *_, last = [cell for cell in found.cells if cell.cell_type == "code"]
    said = last.outputs[-1]["data"]["text/plain"]
    accuracy, _, times = said.strip("'").partition(" on all digits, ")
    assert float(accuracy) > 0.85
    assert int(times.split()[0]) > 20
    streams = "".join(out.get("text", "") for cell in found.cells for out in cell.get("outputs", []))
    assert "round 12 of 12" in streams, "progress is shown in a notebook"


def test_a_kernel_that_dies_goes_on_with_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE.parents[2]))
    first = nbformat.read(EXAMPLE, as_version=4)
    codes = [cell for cell in first.cells if cell.cell_type == "code"][:3]
    codes[2].source = codes[2].source.replace("clients=20", f"clients=20, home={str(tmp_path)!r}")
    again = [nbformat.from_dict(dict(cell)) for cell in codes]
    dies = "__import__('os').kill(__import__('os').getpid(), 9) if event.round == 5 else None"
    codes[2].source = codes[2].source.replace("seconds.append(event.seconds)", dies)
    first.cells = codes
    with pytest.raises(DeadKernelError):
        NotebookClient(first, timeout=300).execute()
    second = nbformat.v4.new_notebook(cells=[*again, nbformat.v4.new_code_cell("(len(seconds), len(history.rounds))")])
    found = NotebookClient(second, timeout=300).execute()
    assert found.cells[-1].outputs[-1]["data"]["text/plain"] == "(7, 12)"
