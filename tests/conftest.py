"""What every test stands on: no state directory of this machine's user is ever touched."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell made this a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).parent
# Parts whose tests wait for processes, sockets and a browser, then those that compute; the longest files come first.
WAITING = ("system", "benchmarks", "docs", "web", "test_packaging.py", "cli", "flower", "transport")
COMPUTING = ("simulation", "server", "compression", "client", "privacy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix files that wait with files that compute: alone, the first leave the cores idle and the second share them.

    Long files come first: begun last, one of them is what a single worker is at in the end.
    """
    waiting, computing = dict[Path, float](), dict[Path, float]()

    def place(item: pytest.Item) -> int:
        part = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
        files, parts = (waiting, WAITING) if part in WAITING else (computing, COMPUTING)
        files[item.path] = 0.0
        return parts.index(part) if part in parts else len(parts)

    items.sort(key=place)
    in_order = dict.fromkeys(item.path for item in items)
    for files in (waiting, computing):
        for nth, path in enumerate(path for path in in_order if path in files):
            files[path] = nth / len(files)
    share = waiting | computing
    items.sort(key=lambda item: share[item.path])
    gc.freeze()  # all tests of the suite: the collector of each test would walk them again and again


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets --home writes into a folder of pytest's, and is not told where somebody's services are."""
    monkeypatch.setenv("THINWIRE_HOME", str(Path(tmp_path_factory.getbasetemp()) / "home-nobody-named"))
    for name in ("THINWIRE_LISTEN", "THINWIRE_DASHBOARD"):
        monkeypatch.delenv(name, raising=False)
