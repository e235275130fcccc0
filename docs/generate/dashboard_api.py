"""The OpenAPI document of the dashboard's API, as the dashboard serves it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from thinwire.store import Store
from thinwire.web.app import create_app
from thinwire.web.problems import DescribedApp
from thinwire.web.settings import Settings


def openapi() -> str:
    """The document of the dashboard on an empty store."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.sqlite3") as store:
        app = create_app(Settings(store.url), store).app
        assert isinstance(app, DescribedApp)
        return json.dumps(app.openapi(), indent=2, ensure_ascii=False) + "\n"
