"""What all pages keep: links and names of files lead somewhere, and nothing names a machine's folders or a registry."""

from __future__ import annotations

import re

from tests.support.shell_blocks import PAGES, ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OWNERS = {"aggregator.toml", "client.toml"}  # files of a state directory
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|js|md|toml|txt|hpp)|(?:[\w.-]+/)+)`")  # files and folders
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


def test_each_file_and_folder_that_the_map_names_exists():
    """The map names many beside others, so the end of a path is enough."""
    files = [path for top in ("thinwire", "tests", "docs", "examples", "csrc", "benchmarks", "requirements")
             for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]  # fmt: skip
    there = {f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in [*files, *ROOT.glob("*")]}
    ends = {path[at:] for path in there for at, letter in enumerate(path[:-1]) if letter == "/"}
    named = NAMED.findall((ROOT / "AGENTS.md").read_text())
    assert len(named) > 200
    assert [name for name in named if f"/{name}" not in ends and name not in OWNERS] == []
