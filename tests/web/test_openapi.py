"""Each operation of the API answers generated requests as docs/reference/openapi.json says, and never with 500."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from tests.web.test_roles import HOST, PLACES, Visitors
from thinwire.store import Store
from thinwire.store.database import database_url
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

if TYPE_CHECKING:  # each worker collects this file, and one runs it
    import schemathesis
    from schemathesis.schemas import APIOperation

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
KNOWN = {"run_id": "digits-1", **PLACES}  # what the store has
EXAMPLES = 6  # requests of each operation
METHODS = {"delete", "get", "patch", "post", "put"}  # other keys of a path are no operations


def _document() -> dict[str, Any]:
    """Return the committed document, in which a name in a path may be one that the store has, or any other."""
    found: dict[str, Any] = json.loads(FILE.read_bytes())
    for methods in found["paths"].values():
        for parameter in (one for operation in methods.values() for one in operation.get("parameters", [])):
            if parameter["in"] == "path" and (known := KNOWN.get(parameter["name"])):
                of_store = int(known) if known.isdecimal() else known
                parameter["schema"] = {"anyOf": [{"const": of_store}, parameter["schema"]]}
    return found


LABELS = [
    f"{method.upper()} {path}" for path, methods in _document()["paths"].items() for method in methods.keys() & METHODS
]


@pytest.fixture(scope="module")
def operations() -> Mapping[str, APIOperation]:
    import schemathesis
    from schemathesis.core.result import Ok

    found = schemathesis.openapi.from_dict(_document()).get_all_operations()
    return {each.ok().label: each.ok() for each in found if isinstance(each, Ok)}


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


def test_the_document_has_all_operations(operations: Mapping[str, APIOperation]) -> None:
    assert operations.keys() == set(LABELS)
    assert len(LABELS) == sum(len(methods) for methods in _document()["paths"].values())


@pytest.mark.parametrize("label", sorted(LABELS))
def test_generated_requests_get_documented_answers(
    client: TestClient, operations: Mapping[str, APIOperation], label: str
) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conforms = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operations[label].as_strategy())
    def answers(case: schemathesis.Case) -> None:
        sent = case.as_transport_kwargs(base_url=HOST)
        sent["content"] = sent.pop("data", None)  # httpx calls the bytes of a body so
        case.validate_response(client.request(**sent), checks=[not_a_server_error, *conforms])

    answers()
