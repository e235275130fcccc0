"""The API's rows as CSV, for a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from thinwire.web import models
from thinwire.web.addresses import OfRound, RunId
from thinwire.web.device_models import Device
from thinwire.web.device_reading import Devices
from thinwire.web.reading import Reader

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_routes(reader: Reader, devices: Devices) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/api/runs/{run_id}/rounds.csv", response_class=Response)
    def rounds_csv(run_id: RunId) -> Response:
        return as_csv(reader.rounds(run_id), models.Round, f"{run_id}-rounds")

    @router.get("/api/runs/{run_id}/updates.csv", response_class=Response)
    def updates_csv(run_id: RunId, number: OfRound = None) -> Response:
        name = f"{run_id}-updates" if number is None else f"{run_id}-round-{number}"
        return as_csv(reader.updates(run_id, number), models.Update, name)

    @router.get("/api/runs/{run_id}/clients.csv", response_class=Response)
    def clients_csv(run_id: RunId) -> Response:
        return as_csv(reader.run(run_id).clients, models.Client, f"{run_id}-clients")

    @router.get("/api/devices.csv", response_class=Response)
    def devices_csv() -> Response:
        return as_csv(devices.all(), Device, "devices")

    return router


def as_csv(rows: Sequence[BaseModel], kind: type[BaseModel], name: str) -> Response:
    """A column a field; dictionaries of numbers become a column a key, all else that is not plain stays JSON."""
    flat = [_flat(row.model_dump(mode="json")) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row)) or list(kind.model_fields)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in flat)
    said = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return Response(out.getvalue(), media_type="text/csv; charset=utf-8", headers=said)


def cell(value: object) -> object:
    """Text that a spreadsheet would run as a formula is marked as text.

    >>> cell("=1+1"), cell(-3), cell(None)
    ("'=1+1", -3, '')
    """
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _flat(row: dict[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict) and all(isinstance(v, int | float | None) for v in value.values()):
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, dict | list) else value
    return flat
