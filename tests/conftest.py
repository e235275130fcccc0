"""What every test stands on: no state folder of this machine's user is ever touched."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell made this a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets --home writes into a folder of pytest's, and is not told where somebody's services are."""
    monkeypatch.setenv("THINWIRE_HOME", str(Path(tmp_path_factory.getbasetemp()) / "home-nobody-named"))
    for name in ("THINWIRE_LISTEN", "THINWIRE_PAGE"):
        monkeypatch.delenv(name, raising=False)
