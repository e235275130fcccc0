"""What all tests of simulations begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fork_server import forking
from thinwire.simulation import process_pool


@pytest.fixture(autouse=True, scope="module")
def _forked_workers() -> Iterator[None]:
    """Each worker process imports torch, which takes longer than its few small clients."""
    with forking(process_pool):
        yield
