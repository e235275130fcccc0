"""Rows of a table as a response: a page of them, with a header that names the next page, or all of them as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response

from thinwire.core.formatting import csv_cell

First = Annotated[int, Query(ge=0, le=2**31 - 1)]
Row = TypeVar("Row")


def page_of(found: list[Row], first: int, count: int, response: Response) -> list[Row]:
    """Return `count` rows of `found`, which has one more if there is a next page; the header `Link` names that page."""
    if len(found) > count:
        response.headers["Link"] = f'<?first={first + count}&count={count}>; rel="next"'
    return found[:count]


def next_page(after: int) -> dict[str, str]:
    """Return the header that names the next page, with the rounds from `after` on; none for 0.

    The address is relative to that of the request (RFC 3986, section 5.2), so that any prefix of a proxy works.
    """
    return {"Link": f'<?from={after}>; rel="next"'} if after else {}


def as_csv(rows: Sequence[BaseModel], kind: type[BaseModel], name: str) -> Response:
    """Return rows as a CSV response with a column for each field.

    Dictionaries of numbers become a column for each key; other structures stay JSON.
    """
    return text_of([row.model_dump(mode="json") for row in rows], list(kind.model_fields), name)


def text_of(rows: Sequence[dict[str, object]], columns: Sequence[str], name: str) -> Response:
    """Return rows of JSON values as a CSV response; `columns` are those without any row."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row)) or list(columns)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in flat)
    said = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return Response(out.getvalue(), media_type="text/csv; charset=utf-8", headers=said)


def _flat(row: dict[str, object]) -> dict[str, object]:
    """Return a row with its dictionaries of numbers flattened."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict) and all(isinstance(v, int | float | None) for v in value.values()):
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, dict | list) else value
    return flat
