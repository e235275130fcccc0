"""Every `sh` block of README and docs is typed as it stands, in a folder and a home of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.shell_blocks import PAGES, Reader, blocks_of

BLOCKS = {page: list(blocks_of(page)) for page in PAGES}
READ = [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks)]
AT_ONCE = 2  # a page waits for its services most of the time


def read(page: str, folder: Path) -> None:
    reader = Reader(folder)
    try:
        for block in BLOCKS[page]:
            if block.runs:
                reader.read(block)
    finally:
        reader.close()


@pytest.fixture(scope="module")
def reading(request, tmp_path_factory) -> Iterator[Mapping[str, Future[None]]]:
    """All pages whose tests were chosen, read beside each other."""
    chosen = [item.callspec.params["page"] for item in request.session.items if item.parent is request.node
              and hasattr(item, "callspec")]  # fmt: skip
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {page: pool.submit(read, page, tmp_path_factory.mktemp("page")) for page in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("page", READ)
def test_the_shell_blocks_of_a_page_work_one_after_the_other(page, reading):
    reading[page].result()


def test_a_block_that_is_not_run_says_why():
    silent = [f"{b.page}:{b.line}" for blocks in BLOCKS.values() for b in blocks if b.how == "not run" and not b.word]
    assert silent == []


def test_a_block_that_is_run_on_another_page_stands_there_line_for_line():
    elsewhere = {page: "".join(block.script for block in blocks if block.runs) for page, blocks in BLOCKS.items()}
    same = [block for blocks in BLOCKS.values() for block in blocks if block.how == "run in"]
    strange = [(b.page, line) for b in same for line in b.script.splitlines() if line not in elsewhere[b.word]]
    assert strange == []
