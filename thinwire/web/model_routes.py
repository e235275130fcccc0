"""The routes of a run's model versions: which are kept, and one of them as a .safetensors file.

The file has the bytes that `thinwire runs model` writes. The dashboard makes one file at a time, because a model takes
memory several times while it is made, and streams it from a file without a name that goes with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import IO, Annotated, Any, Final

from fastapi import APIRouter, Path
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from thinwire.core.disk_reserve import require_space
from thinwire.core.errors import NotFound, Refused
from thinwire.core.statedir import AggregatorHome
from thinwire.reports.stored_models import kept_models, kept_versions, stored_model, stored_version
from thinwire.store import RunRow, Store
from thinwire.web.access import API, RunId, Who, from_state
from thinwire.web.problems import PROBLEMS
from thinwire.web.schemas import Answer
from thinwire.web.settings import Settings

MEDIA_TYPE: Final = "application/octet-stream"
MODELS: Final = "/models/"  # in the path of every model file
PIECE: Final = 1 << 20  # bytes read from the file at once
MAX_AT_ONCE: Final = 4  # files under way
LEAST_RATE: Final = 100_000  # bytes a second, over the whole file
LEAST_S: Final = 30.0  # for the smallest file
FILE: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}, "description": "safetensors"}
}


class ModelVersion(Answer):
    """Holds a kept model version, which `round` made; 0 for the first model.

    `metrics` are empty if it was not evaluated. `best` and `latest` mark those of the run.
    """

    version: int
    round: int
    metrics: dict[str, float | None]
    size: int = Field(description="bytes as stored; its file has about as many")
    best: bool
    latest: bool


class ModelFiles:
    """Makes the files of model versions one at a time, and sends a few at once."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._lock = store, settings.lock
        self._making, self._under_way = threading.Lock(), 0

    def kept(self, name: str) -> list[ModelVersion]:
        """Return the kept versions of a run, newest first; none if the dashboard knows no state directory."""
        run = self._store.run(name)
        found = kept_models(self._store, AggregatorHome(self._lock.parent), run) if self._lock else []
        return [ModelVersion.model_validate(one) for one in found]

    async def send(self, name: str, version: str, who: str) -> Response:
        """Return the response with a version's file; `Refused` if too many files are being sent.

        Law: no file leaves before the audit log has who took which version of which run.
        """
        if self._under_way >= MAX_AT_ONCE:
            raise Refused(
                "other models are being downloaded", f"{MAX_AT_ONCE} at once are sent", "try again when they end"
            )
        self._under_way += 1  # before the first wait, during which another may begin
        try:
            found = await run_in_threadpool(self._make, name, version, who)
        except BaseException:
            self._ended()
            raise
        return FileResponse(*found, self._ended)

    def _ended(self) -> None:
        self._under_way -= 1

    def _make(self, name: str, version: str, who: str) -> tuple[str, IO[bytes], int]:
        """Return the name of a version's file, the open file, and its bytes; `version` is a number, best or last.

        `NotFound` if the run does not keep that version, `Refused` if the disk has no room for a copy of it.
        """
        run = self._store.run(name)
        if self._lock is None:
            raise NotFound(
                f"the models of {run.run_id} are not here", "this dashboard does not know the state directory",
                f"thinwire runs model {run.run_id} --out FILE, on the aggregator's machine",
            )  # fmt: skip
        home = AggregatorHome(self._lock.parent)
        with self._making:
            if version.isdecimal():
                _require_kept(run, home, int(version))
                found = stored_version(self._store, home, run, int(version))
            else:
                found = stored_model(self._store, home, run.run_id, version)
            data, _ = found.to_safetensors()
            file = _spooled(home.root, data)
        try:
            self._store.audit.add(who, "download model", f"{run.run_id}, version {found.row.version}")
        except BaseException:
            file.close()
            raise
        return f"{run.run_id}-v{found.row.version}.safetensors", file, len(data)


def _require_kept(run: RunRow, home: AggregatorHome, version: int) -> None:
    kept = kept_versions(home, run.run_id)
    if version not in kept:
        shown = ", ".join(map(str, kept[-8:]))
        raise NotFound(
            f"{run.run_id} does not keep the model version {version}",
            f"it keeps {'of the newest ' if len(kept) > 8 else ''}{shown}" if kept else "it keeps none",
            f'{API}/runs/{run.run_id}/models lists them; [run] keep = "all" keeps every version',
        )


def _spooled(folder: FilePath, data: bytes) -> IO[bytes]:
    """Return an open file without a name that holds these bytes; `Refused` if the disk has no room for it."""
    require_space(folder, len(data))
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the response closes it
    file.write(data)
    file.seek(0)
    return file


class FileResponse(StreamingResponse):
    """Streams an open file and closes it; ends early if the browser reads less than `LEAST_RATE`."""

    def __init__(self, name: str, file: IO[bytes], size: int, ended: Callable[[], None]) -> None:
        self._file, self._limit_s, self._ended = file, LEAST_S + size / LEAST_RATE, ended
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(size)}
        super().__init__(_pieces(file), media_type=MEDIA_TYPE, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        try:
            with self._file, contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


Version = Annotated[str, Path(pattern=r"^([0-9]{1,9}|best|last)$", description="a model version, best or last")]
FilesDep = Annotated[ModelFiles, from_state("model_files")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/runs/{run_id}/models")
def models(files: FilesDep, run_id: RunId) -> list[ModelVersion]:
    """Return the kept model versions of a run, newest first: at most 20, and the best one."""
    return files.kept(run_id)


@router.get("/runs/{run_id}/models/{version}", response_class=StreamingResponse, responses=FILE)
async def model(files: FilesDep, run_id: RunId, version: Version, who: Who) -> Response:
    """Return a kept model version as a .safetensors file, and record who took it; without personal layers, which never
    leave their clients.
    """
    return await files.send(run_id, version, who)
