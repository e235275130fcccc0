"""Each operation of the API answers generated requests as docs/reference/openapi.json says, and never with 500."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from tests.web.test_roles import HOST, PLACES, Visitors
from thinwire.store import Store
from thinwire.store.database import database_url
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
KNOWN = {"run_id": "digits-1", **PLACES}  # what the store has
EXAMPLES = 6  # requests of each operation
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def _document() -> dict[str, Any]:
    """Return the committed document, in which a name in a path may be one that the store has, or any other."""
    found: dict[str, Any] = json.loads(FILE.read_bytes())
    for methods in found["paths"].values():
        for parameter in (one for operation in methods.values() for one in operation.get("parameters", [])):
            if parameter["in"] == "path" and (known := KNOWN.get(parameter["name"])):
                of_store = int(known) if known.isdecimal() else known
                parameter["schema"] = {"anyOf": [{"const": of_store}, parameter["schema"]]}
    return found


SCHEMA = schemathesis.openapi.from_dict(_document())
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations() if isinstance(each, Ok)}


@pytest.fixture(scope="module")
def client(finished: Told, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The session of an admin who gave the password a moment ago; streams of events end at once."""
    path = tmp_path_factory.mktemp("openapi") / "store.sqlite3"
    shutil.copy(database_url(finished.store.url).database or "", path)
    with Store.open(path, durable=False) as store:
        app = create_app(Settings(store.url, port=8080), store, closing=lambda: True)
        with TestClient(app, base_url=HOST, follow_redirects=False, raise_server_exceptions=False) as client:
            client.headers.update(Visitors(store, client).session("admin"))
            yield client


def test_the_document_has_all_operations() -> None:
    assert len(OPERATIONS) == sum(len(methods) for methods in SCHEMA.raw_schema["paths"].values())


@pytest.mark.parametrize("label", OPERATIONS)
def test_generated_requests_get_documented_answers(client: TestClient, label: str) -> None:
    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=OPERATIONS[label].as_strategy())
    def answers(case: schemathesis.Case) -> None:
        sent = case.as_transport_kwargs(base_url=HOST)
        sent["content"] = sent.pop("data", None)  # httpx calls the bytes of a body so
        case.validate_response(client.request(**sent), checks=CHECKS)

    answers()
