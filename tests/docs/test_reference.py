"""The reference is what the code says: nobody edits it, and nobody forgets to write it again."""

from __future__ import annotations

import pytest

from docs.generate.__main__ import DOCS, PAGES, REFERENCE, page, written

WRITTEN = written()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_committed_page_is_what_the_script_writes(name):
    assert (DOCS / name).read_text() == WRITTEN[name], "run: python -m docs.generate"


def test_no_page_of_the_reference_is_written_by_hand():
    assert {path.name for path in REFERENCE.iterdir()} == set(PAGES)


def test_every_key_of_the_plan_has_a_meaning():
    rows = [line for line in page("plan.md").splitlines() if line.startswith("| `")]
    silent = [row for row in rows if not row.replace("\\|", "").split("|")[4].strip()]
    assert silent == []
