"""The command line in this process: what it prints and the code it ends with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_story import KEY
from thinwire.cli.main import main
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Thinwire = Callable[..., Said]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with Store.open(AggregatorHome.under(home).database) as store:
        yield store


@pytest.fixture
def device(store: Store) -> None:
    """One that was approved."""
    store.roster.enrol("pi-01", KEY, b"key", "loopback")


@pytest.fixture
def thinwire(capsys: pytest.CaptureFixture[str]) -> Thinwire:
    def call(*words: object) -> Said:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return call
