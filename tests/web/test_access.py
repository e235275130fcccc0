"""Each route has a least role, and every error is a problem document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from thinwire.store import Store
from thinwire.web.access import LEAST, Access, Least, Match, RouteWithoutRole, declared
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

Visit = Callable[..., TestClient]


@pytest.fixture
def app(store: Store) -> Any:
    return create_app(Settings(store.url, port=8080), store).app


def test_a_route_without_a_role_is_refused_when_the_dashboard_starts(app: Any):
    app.router.routes.append(Route("/api/v1/everything", lambda _: None, methods=["DELETE"]))
    with pytest.raises(RouteWithoutRole, match="without a row.*DELETE /api/v1/everything"):
        Access.of(app)


def test_a_row_without_a_route_is_refused_too(app: Any):
    with pytest.raises(RouteWithoutRole, match="rows without a route.*GET /gone"):
        Access.of(app, {**LEAST, "GET /gone": "viewer"})


def test_every_route_of_the_api_is_under_its_version(app: Any):
    rows = [row.split(" ")[1] for row in declared(app)]
    assert len(rows) > 25
    assert {path for path in rows if path.startswith("/api")} == {path for path in rows if path.startswith("/api/v1/")}


def test_of_two_rows_that_match_the_higher_role_counts(app: Any):
    app.router.routes.append(Route("/api/v1/runs/{run_id}/burn", lambda _: None, methods=["POST"]))
    access = Access.of(app, {**LEAST, "POST /api/v1/runs/{run_id}/burn": "admin"})
    assert access.find("POST", "/api/v1/runs/digits-1/burn").least == Least("admin")
    assert access.find("POST", "/api/v1/runs/digits-1/stop") == Match(Least("operator"), "digits-1")
    assert access.find("HEAD", "/api/v1/runs") == Match(Least("viewer"))
    assert access.find("GET", "/nothing") == Match(None)


def test_every_error_is_a_problem_document(page: TestClient, visit: Visit, told: Told):
    here = {"Origin": "http://127.0.0.1:8080"}
    answers = [
        (404, "Not Found", page.get("/api/v1/runs/none")),
        (404, "Not Found", page.get("/api/v1/nothing")),
        (405, "Method Not Allowed", page.delete("/api/v1/runs", headers=here)),
        (409, "Conflict", page.post(f"/api/v1/runs/{told.run_id}/resume", headers=here)),
        (422, "Unprocessable Entity", page.get("/api/v1/runs/a%20b")),
        (401, "Unauthorized", visit().get("/api/v1/runs")),
        (403, "Forbidden", page.get("/api/v1/runs", headers={"Origin": "http://evil.example"})),
        (413, "Request Entity Too Large", page.post("/login", content=b"x" * 70_000)),
        (421, "Misdirected Request", page.get("/", headers={"Host": "evil.example"})),
    ]
    for status, title, answer in answers:
        said = answer.json()
        assert answer.headers["content-type"] == "application/problem+json", said
        assert (answer.status_code, said["status"], said["title"], said["type"]) == (
            status, status, title, "about:blank",
        )  # fmt: skip
        assert said["detail"]
        assert "why" in said
        assert said["try"]


def test_the_openapi_document_describes_the_errors_that_are_sent(page: TestClient):
    document = page.get("/api/v1/openapi.json").json()
    for path, methods in document["paths"].items():
        for one in methods.values():
            (error,) = one["responses"]["default"]["content"].items()
            assert error == ("application/problem+json", {"schema": {"$ref": "#/components/schemas/Problem"}}), path
    assert set(document["components"]["schemas"]["Problem"]["required"]) == {"title", "status", "detail"}
