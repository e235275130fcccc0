"""Every example in a docstring prints what stands below it."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for part in ("thinwire", "benchmarks", "docs/generate", "examples")
    for file in (ROOT / part).rglob("*.py")
    if ">>> " in file.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_in_every_part() -> None:
    assert len(WITH_EXAMPLES) > 80, WITH_EXAMPLES
