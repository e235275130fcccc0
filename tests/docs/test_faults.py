"""docs/explain/faults.md names tests that are there."""

from __future__ import annotations

import re

import pytest

from tests.support.shell_blocks import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
PAGE = (ROOT / "docs" / "explain" / "faults.md").read_text()


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(PAGE))))
def test_a_test_that_the_table_names_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text()
    assert not name or re.search(rf"^(def {name}\(|class {name}\b|{name} = )", text, re.MULTILINE)


def test_every_row_of_the_table_names_one() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| what", "|---"))]
    assert len(rows) >= 13
    assert [row for row in rows if not NAMED.search(row)] == []
