"""What all pages keep: links lead somewhere, and nothing names a machine's folders or a package registry."""

from __future__ import annotations

import re

from tests.support.shell_blocks import PAGES, ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MACHINE = re.compile(r"/(?:work|root|tmp)/|https?://\S*(?:simple|whl|channel)")


def test_links_within_the_repository_lead_somewhere():
    links = [(name, link.partition("#")[0]) for name in PAGES for link in LINK.findall((ROOT / name).read_text())
             if "://" not in link]  # fmt: skip
    assert [(name, to) for name, to in links if to and not ((ROOT / name).parent / to).exists()] == []


def test_no_page_names_a_machine_or_a_registry():
    assert [(name, found) for name in PAGES for found in MACHINE.findall((ROOT / name).read_text())] == []


def test_every_page_of_docs_is_linked_from_another():
    linked = {path.resolve() for path in (ROOT / "docs" / "adr").glob("*.md")}  # the index links the folder
    for name in PAGES:
        folder = (ROOT / name).parent
        linked |= {(folder / link.partition("#")[0]).resolve() for link in LINK.findall((ROOT / name).read_text())}
    assert [name for name in PAGES if name.startswith("docs/") and (ROOT / name).resolve() not in linked] == []
