"""What several tests of the client begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fork_server import forking
from thinwire.client import worker_process


@pytest.fixture(autouse=True, scope="module")
def _forked_workers() -> Iterator[None]:
    """Each worker imports torch, which takes longer than most of what these tests have it do."""
    with forking(worker_process):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Here as there: torch's sums depend on how many add them up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
