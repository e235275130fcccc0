"""Every `sh` block of README and docs is typed as it stands, in a folder and a home of its own."""

from __future__ import annotations

import pytest

from tests.docs.blocks import PAGES, Reader, blocks_of

BLOCKS = {page: list(blocks_of(page)) for page in PAGES}


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if any(b.how != "not run" for b in blocks)])
def test_the_shell_blocks_of_a_page_work_one_after_the_other(page, tmp_path):
    reader = Reader(tmp_path)
    try:
        for block in BLOCKS[page]:
            if block.how != "not run":
                reader.read(block)
    finally:
        reader.close()


def test_a_block_that_is_not_run_says_why():
    silent = [f"{b.page}:{b.line}" for blocks in BLOCKS.values() for b in blocks if b.how == "not run" and not b.word]
    assert silent == []
