"""A part of a file as memory: what the page cache holds already is read where it lies, and never copied."""

from __future__ import annotations

import mmap
import os
import sys

POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: map all pages now, and say so where one cannot be read
LEAST = 1 << 20  # bytes from which it pays: a call of read() takes shorter than a mapping is made in


def mapped(descriptor: int, at: int, length: int) -> memoryview | None:
    """`length` bytes from `at` on, for as long as somebody holds the view; None: read them.

    Only of files that nobody cuts any more: to touch a page behind the end of a file, or one that the disk cannot
    give, is a signal and not an exception. So all pages are asked for first, and where that fails `read` says why.
    """
    if sys.platform != "linux" or length < LEAST or os.fstat(descriptor).st_size < at + length:
        return None
    start = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # a mapping begins at a page
    try:
        pages = mmap.mmap(descriptor, at + length - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        pages.madvise(POPULATE_READ)
    except OSError:  # an older kernel, a file system without mappings, or a page that cannot be read
        return None
    return memoryview(pages)[at - start :]
