"""What several tests of the client begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fork_server import forking
from tests.support.trained_elsewhere import Elsewhere
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


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """One for all tests of a file: most of them end its process, and none may leave a trace for the next."""
    made = Elsewhere(tmp_path_factory.mktemp("worker"), threads=1)
    made.worker.describe()
    yield made
    made.worker.close()


@pytest.fixture
def number(request: pytest.FixtureRequest, elsewhere: Elsewhere) -> Iterator[int]:
    """A round of its own."""
    elsewhere.wish()
    yield 1 + request.session.items.index(request.node)
    elsewhere.wish()
