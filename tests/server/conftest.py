"""In these tests every second round begins with a snapshot, so that restarts read one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from thinwire.server.state import snapshot


@pytest.fixture(scope="module", autouse=True)
def snapshots_often() -> Iterator[None]:
    with patch.object(snapshot, "SNAPSHOT_ROUNDS", 2):
        yield
