"""Rows of a table as a response: a page of them, with a header that names the next page, or all of them as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Final, TypeVar

from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from thinwire.core.formatting import csv_cell

First = Annotated[int, Query(ge=0, le=2**31 - 1)]
CSV: Final = "text/csv; charset=utf-8"
Row = TypeVar("Row")
Rows = Sequence[dict[str, object]]


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
    return Response("".join(_lines([flat], _columns([flat]) or columns)), media_type=CSV, headers=_named(name))


def streamed_csv(
    pages: Callable[[], Iterable[Sequence[BaseModel]]], kind: type[BaseModel], name: str
) -> StreamingResponse:  # fmt: skip
    """Return the rows of all pages as the CSV response that `as_csv` makes of them, with one page in memory.

    `pages` is read twice: now for the columns, which may depend on the last row, and again while the rows are sent.
    A key that is new since the first read has no column.
    """

    def flat() -> Iterator[Rows]:
        for rows in pages():
            yield [_flat(row.model_dump(mode="json")) for row in rows]

    columns = _columns(flat()) or list(kind.model_fields)
    return StreamingResponse(_lines(flat(), columns), media_type=CSV, headers=_named(name))


def _columns(pages: Iterable[Rows]) -> list[str]:
    """Return the keys of all rows, in the order in which they are first seen."""
    return list(dict.fromkeys(key for rows in pages for row in rows for key in row))


def _lines(pages: Iterable[Rows], columns: Sequence[str]) -> Iterator[str]:
    """Yield the text of each page of rows, the first with the header; values without a column are left out."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    for rows in pages:
        writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in rows)
        yield out.getvalue()
        out.seek(0)
        out.truncate()


def _named(name: str) -> dict[str, str]:
    """Return the header that makes a browser save the response as this file."""
    return {"Content-Disposition": f'attachment; filename="{name}.csv"'}


def _flat(row: dict[str, object]) -> dict[str, object]:
    """Return a row with its dictionaries of numbers flattened."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict) and all(isinstance(v, int | float | None) for v in value.values()):
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, dict | list) else value
    return flat
