"""`tests.mutate` draws the same mutants of a commit again, and each is valid code that differs in one place."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from tests.mutate import checks_of, drawn, mutants

ROOT = Path(__file__).parents[1]
SOURCE = """
def f(a: int = 1, *, b) -> bool:
    if not a > 2 and b is None:
        raise ValueError(f"{a + 1}")
    note(b)
    return a in (True,)
"""


def test_each_mutant_changes_one_thing_and_no_annotation_or_text() -> None:
    found = {each.after for each in mutants("m.py", SOURCE)}
    assert found == {
        "2", "(not a > 2 or b is None)", "(a > 2)", "(a >= 2)", "3", "(b is not None)", "pass", "(a not in (True,))",
        "False",
    }  # fmt: skip
    for each in mutants("m.py", SOURCE):
        changed = each.apply(SOURCE)
        ast.parse(changed)
        assert changed != SOURCE


def test_a_seed_draws_the_same_mutants_and_another_one_others(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "thinwire" / "privacy", tmp_path / "thinwire" / "privacy")  # drawing reads all files
    first, again, other = drawn(tmp_path, 20, "a"), drawn(tmp_path, 20, "a"), drawn(tmp_path, 20, "b")
    assert first == again != other
    for each in first:
        ast.parse(each.apply((tmp_path / each.file).read_text()))


def test_a_mutant_is_tested_first_by_what_imports_its_module() -> None:
    direct, others = checks_of(ROOT, "thinwire/server/round.py")
    assert direct[:2] == ["thinwire/server/round.py", "tests/server/test_round.py"]
    assert "tests/server/test_run.py" in others
    assert not [each for each in direct + others if each.startswith("tests/system")]
