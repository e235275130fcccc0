"""docs/how/ports.md has the number of lines of each port, and a port learns."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.shell_blocks import ROOT
from thinwire.core import RunPlan
from thinwire.simulation import simulate

PORTS = ROOT / "examples" / "ports"
PAGE = (ROOT / "docs" / "how" / "ports.md").read_text()
TASKS = {
    "Flower, PyTorch": ("flower_pytorch", "flower_pytorch"),
    "Flower, transformers": ("flower_transformers", "flower_transformers"),
    "Flower, PyTorch Lightning": ("flower_lightning", "flower_lightning"),
    "Flower, scikit-learn": ("flower_sklearn", "flower_sklearn"),
    "NVFlare, hello-pt": ("nvflare_hello_pt", "flower_pytorch"),
}
LOADING = ("data", "read")


def lines_of(task: Path) -> int:
    """Return the lines of code without blank lines, comments, docstrings, the model's class and data loading."""
    text = task.read_text()
    tree = ast.parse(text)
    left_out = [tree.body[0]]  # the docstring
    left_out += [
        one
        for one in tree.body
        if isinstance(one, ast.ClassDef) or (isinstance(one, ast.FunctionDef) and one.name in LOADING)
    ]
    skipped = {line for one in left_out for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    return sum(number not in skipped and bool(code_of(line)) for number, line in enumerate(text.splitlines(), 1))


def code_of(line: str) -> str:
    return line.partition("#")[0].strip()


@pytest.mark.parametrize("name", TASKS)
def test_the_page_has_the_lines_of_each_port(name: str) -> None:
    plan, task = TASKS[name]
    plan_lines = sum(bool(code_of(line)) for line in (PORTS / f"{plan}.toml").read_text().splitlines())
    (row,) = re.findall(rf"^\| {re.escape(name)} \| \d+ \| (\d+) \|", PAGE, re.MULTILINE)
    assert int(row) == lines_of(PORTS / f"{task}.py") + plan_lines


def test_the_port_with_scikit_learn_learns() -> None:
    """Those with PyTorch run as blocks of the page, those with other packages in tests/extras/test_ports.py."""
    plan = RunPlan.load(PORTS / "flower_sklearn.toml")
    made = simulate(f"flower_sklearn={PORTS / 'flower_sklearn.py'}", plan, clients=4)
    assert made.metrics["accuracy"] > 0.9
