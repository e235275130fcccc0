"""The reference is what the code says: nobody edits it, and nobody forgets to write it again."""

from __future__ import annotations

import re

from docs.generate.__main__ import DOCS, PAGES, REFERENCE, page, written


def test_every_committed_page_is_what_the_script_writes():
    stale = [name for name, text in written().items() if (DOCS / name).read_text() != text]
    assert stale == [], "run: python -m docs.generate"


def test_no_page_of_the_reference_is_written_by_hand():
    assert {path.name for path in REFERENCE.iterdir()} == {*PAGES, "openapi.json"}


def test_every_key_of_the_plan_has_a_meaning():
    rows = [line for line in page("plan.md").splitlines() if line.startswith("| `")]
    silent = [row for row in rows if not row.replace("\\|", "").split("|")[4].strip()]
    assert silent == []


def test_every_environment_variable_is_in_a_table() -> None:
    """Those of users in the reference, those of tests in CONTRIBUTING.md."""
    root = DOCS.parent
    tests = (root / "CONTRIBUTING.md").read_text()
    found = {
        (name, "tests" in path.parts)
        for folder in ("thinwire", "csrc", "examples", "tests", "setup.py", "Makefile")
        for path in ([root / folder] if (root / folder).is_file() else sorted((root / folder).rglob("*")))
        if path.suffix in (".py", ".sh", "") and path.is_file()
        for name in re.findall(r"\bTHINWIRE_[A-Z_]+\b|\bXDG_(?:STATE|CONFIG)_HOME\b", path.read_text(errors="ignore"))
    }
    assert len(found) > 8
    users = page("environment.md")
    silent = {name for name, is_test in found if f"| `{name}` |" not in users + tests * is_test}
    assert silent == set()
