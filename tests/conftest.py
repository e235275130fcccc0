"""What every test stands on: no state directory of this machine's user is ever touched."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell made this a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).parent
LONGEST = ("system", "benchmarks", "docs", "test_packaging.py", "simulation")  # with few tests a file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take long come first: begun last, one of them is what a single worker is at in the end."""

    def place(item: pytest.Item) -> int:
        part = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
        return LONGEST.index(part) if part in LONGEST else len(LONGEST)

    items.sort(key=place)
    gc.freeze()  # all tests of the suite: the collector of each test would walk them again and again


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets --home writes into a folder of pytest's, and is not told where somebody's services are."""
    monkeypatch.setenv("THINWIRE_HOME", str(Path(tmp_path_factory.getbasetemp()) / "home-nobody-named"))
    for name in ("THINWIRE_LISTEN", "THINWIRE_DASHBOARD"):
        monkeypatch.delenv(name, raising=False)
