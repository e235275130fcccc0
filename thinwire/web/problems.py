"""Errors of the dashboard's API as problem documents (RFC 9457), and their place in the OpenAPI document.

`title` is the name of the HTTP status, and `detail` says what failed. `why` and `try` are the other two parts of every
error of this product; they are extension members, which the RFC allows.
"""

from __future__ import annotations

import copy
import html
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from thinwire.core.errors import NotFound, PlanError, Refused, ThinwireError, UsageError
from thinwire.core.formatting import with_home

MEDIA_TYPE: Final = "application/problem+json"
PAGE: Final = Path(__file__).parent / "static" / "problem.html"
NO_PAGE: Final = "There is no page at this address"
NO_ROUTE: Final = "no route has this address with this method"
NOT_ROUTED: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
DESCRIBED: Final = "GET /api/v1/openapi.json has each route with its parameters"
_SCHEMA: Final = {"$ref": "#/components/schemas/Problem"}
_OF_FASTAPI: Final = ("HTTPValidationError", "ValidationError")  # schemas of errors that this API does not send


class Problem(BaseModel):
    """Holds an error: what failed, why, and what to try."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    type: str = "about:blank"
    title: str = Field(description="name of the HTTP status")
    status: int
    detail: str = Field(description="what failed")
    why: str = ""
    hint: str = Field("", alias="try", description="what to try")
    confirm: str | None = Field(None, description="what to give again first, at /session/confirm: password or code")


PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": Problem, "description": "Error"}}


def problem(
    status: int, detail: str, why: str = "", hint: str = "", headers: Mapping[str, str] | None = None,
    confirm: str | None = None,
) -> Response:  # fmt: skip
    """Return an error as a problem document."""
    said = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, why=why, hint=hint, confirm=confirm)
    return JSONResponse(said.model_dump(by_alias=True, exclude_none=True), status, headers, MEDIA_TYPE)


_STATUS: Final[tuple[tuple[type[ThinwireError], int], ...]] = (
    (NotFound, 404), (Refused, 409), (UsageError, 422), (PlanError, 422),
)  # fmt: skip


def add_handlers(app: FastAPI, home: str) -> None:
    """Turn every error into a problem document; `home` is the option for commands in hints."""
    app.add_exception_handler(ThinwireError, _refused(home))
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)


def _refused(home: str) -> Callable[[Request, Exception], Response]:
    """Return the handler for a ThinwireError: status 404, 409, 422 or 503."""

    def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ThinwireError)
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 503)
        return problem(status, error.what, error.why, with_home(error.hint, home))

    return refused


def problem_page(path: str, status: int, what: str, why: str) -> Response:
    """Return an error as a page for a person in a browser; `path` is the address that was opened."""
    text = PAGE.read_text(encoding="utf-8").replace("{{root}}", "../" * (path.count("/") - 1) or "./")
    return HTMLResponse(text.replace("{{what}}", html.escape(what)).replace("{{why}}", html.escape(why)), status)


def _wants_page(request: Request) -> bool:
    """Return True if a browser opens this address as a page, and not a program that reads the API."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")


def _http(request: Request, error: Exception) -> Response:
    """Return an HTTP error as a problem document, or to a browser as a page."""
    assert isinstance(error, HTTPException)
    if _wants_page(request):
        what = NO_PAGE if error.status_code == HTTPStatus.NOT_FOUND else str(error.detail).lower()
        return problem_page(request.url.path, error.status_code, what, f"You opened {request.url.path}.")
    why = NO_ROUTE if error.status_code in NOT_ROUTED else ""
    return problem(error.status_code, str(error.detail).lower(), why, DESCRIBED, headers=error.headers)


def _invalid(request: Request, error: Exception) -> Response:
    """Return a validation error as a problem document with status 422, or to a browser as a page with status 404."""
    assert isinstance(error, RequestValidationError)
    if _wants_page(request):
        return problem_page(request.url.path, HTTPStatus.NOT_FOUND, NO_PAGE, f"You opened {request.url.path}.")
    said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return problem(422, "the request is not valid", said, DESCRIBED)


class DescribedApp(FastAPI):
    """FastAPI whose OpenAPI document names the media type and the schema of our errors."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            document = copy.deepcopy(super().openapi())
            for methods in document["paths"].values():
                for one in methods.values():
                    one["responses"].pop("422", None)  # it is among the errors of "default"
                    if "default" in one["responses"]:
                        one["responses"]["default"]["content"] = {MEDIA_TYPE: {"schema": _SCHEMA}}
            for name in _OF_FASTAPI:
                document["components"]["schemas"].pop(name, None)
            self.openapi_schema = document
        return self.openapi_schema
