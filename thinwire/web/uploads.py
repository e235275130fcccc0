"""Take initial models through the dashboard: stream each to disk, and read only its header.

The aggregator checks such a model against the task's layout when its run starts. A file is named at random, and goes
when it was not used for a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from thinwire.core.disk_reserve import require_space
from thinwire.core.errors import PlanError, Refused
from thinwire.core.plan_names import UPLOAD
from thinwire.core.statedir import AggregatorHome, disk_error, private_folder
from thinwire.core.tensor_header import LENGTH_BYTES, StoredTensor, header_length, read_header
from thinwire.web.access import API, from_state
from thinwire.web.problems import PROBLEMS
from thinwire.web.schemas import Answer
from thinwire.web.settings import owner_file

NAME_BYTES: Final = 16
UNUSED_S: Final = 24 * 3600.0  # after which a file that no run was started with is removed
CLEAN_EVERY_S: Final = 3600.0
CHUNK_S: Final = 30.0  # until the next bytes of an upload
LEAST_RATE: Final = 100_000  # bytes a second, over the whole upload
MAX_AT_ONCE: Final = 2
LARGEST_ONES: Final = 4  # that the folder holds, or smaller ones of as many bytes
HEADER_BYTES: Final = 10**6  # of an upload's header: 10 000 tensors with names of 60 letters
BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
SUFFIX, DRAFT = ".safetensors", ".part"


class Uploaded(Answer):
    """Holds an uploaded model; `init` is its name for the plan's key `[run] init`."""

    init: str
    tensors: int
    elements: int
    size: int = Field(description="bytes")


def limit_bytes(lock: Path | None) -> int:
    """Return how large an upload may be; 0 if `aggregator.toml` allows none, or nothing says where it is."""
    return 0 if lock is None else owner_file(lock.parent.parent).max_upload_mb * 10**6


def remove_unused(folder: Path, now: float) -> None:
    """Remove the files that were not used for a day, also those of an upload that did not end."""
    for path in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.suffix in (SUFFIX, DRAFT) and now - path.stat().st_mtime > UNUSED_S:
                path.unlink()


class Uploads:
    """Takes uploads into the state directory, a few at a time."""

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._under_way: list[int] = []  # bytes of each, whether or not they have come

    @property
    def folder(self) -> Path | None:
        """Return the folder of the uploads; None if the dashboard does not know the state directory."""
        return None if self._lock is None else AggregatorHome(self._lock.parent).uploads

    def path(self, name: str) -> Path | None:
        """Return the file of an upload by its name; None if there is none."""
        if self.folder is None or not (name.isascii() and name.isalnum()):
            return None
        found = self.folder / f"{name}{SUFFIX}"
        return found if found.is_file() else None

    async def take(self, body: AsyncIterator[bytes], total: int) -> Uploaded:
        """Write a body of `total` bytes to a file; raise `PlanError` or `Refused`, and leave nothing behind then."""
        if self._lock is None or self.folder is None or not 0 < total <= limit_bytes(self._lock):
            allowed = limit_bytes(self._lock) // 10**6
            raise Refused(
                f"a model of {total / 1e6:.0f} MB is not taken", f"this aggregator takes uploads of up to {allowed} MB",
                "max_upload_mb in aggregator.toml, or [run] init with a file on its machine",
            )  # fmt: skip
        if len(self._under_way) >= MAX_AT_ONCE:
            raise Refused("other uploads are under way", f"{MAX_AT_ONCE} at once are taken", "try again when they end")
        self._under_way.append(total)  # before the first wait, during which another may begin
        try:
            return await self._into(self.folder, body, total)
        finally:
            self._under_way.remove(total)

    def _require_room(self, folder: Path) -> None:
        """Raise `Refused` unless disk and folder have room for the uploads that are under way."""
        coming, most = sum(self._under_way), LARGEST_ONES * limit_bytes(self._lock)
        require_space(folder, coming)
        if sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}")) + coming > most:
            raise Refused(
                "there are too many uploads", f"{most // 10**6} MB are kept, until they are unused for a day",
                "run:ID@0 for a model that a run has, or a higher max_upload_mb in aggregator.toml",
            )  # fmt: skip

    async def _into(self, place: Path, body: AsyncIterator[bytes], total: int) -> Uploaded:
        """Write a body of `total` bytes to a file in this folder, which is made if need be."""
        folder = await run_in_threadpool(private_folder, place)
        await run_in_threadpool(remove_unused, folder, time.time())
        await run_in_threadpool(self._require_room, folder)
        name = secrets.token_hex(NAME_BYTES)
        draft = folder / f"{name}{DRAFT}"
        try:
            with draft.open("xb") as file:
                tensors = await _write(file, body, total)
                await run_in_threadpool(os.fsync, file.fileno())
            draft.rename(folder / f"{name}{SUFFIX}")
        except OSError as error:
            raise disk_error(error, folder) from error
        finally:
            draft.unlink(missing_ok=True)
        elements = sum(math.prod(one.shape) for one in tensors)
        return Uploaded(init=UPLOAD + name, tensors=len(tensors), elements=elements, size=total)


async def _write(file: BinaryIO, body: AsyncIterator[bytes], total: int) -> list[StoredTensor]:
    """Write a body to the file and return the tensors of its header, which is checked as soon as it is there."""
    head, wanted, written, tensors = bytearray(), LENGTH_BYTES, 0, None
    async for chunk in _timed(body, time.monotonic() + CHUNK_S + total / LEAST_RATE):
        written += len(chunk)
        if written > total:
            raise PlanError("the upload has more bytes than it said", f"it said {total}", "upload the file again")
        if tensors is None:
            head += chunk
            if wanted == LENGTH_BYTES <= len(head):
                wanted += header_length(bytes(head[:LENGTH_BYTES]), total)
            if wanted > LENGTH_BYTES + HEADER_BYTES:
                raise PlanError(
                    "the upload's header is too large", f"at most {HEADER_BYTES // 10**6} MB are read",
                    "[run] init with a file on the aggregator's machine",
                )  # fmt: skip
            if LENGTH_BYTES < wanted <= len(head):
                tensors = await run_in_threadpool(read_header, bytes(head[LENGTH_BYTES:wanted]), total)
        await run_in_threadpool(file.write, chunk)
    if written != total or tensors is None:
        raise PlanError(
            "the upload did not arrive as a whole", f"{written} of {total} bytes came", "upload the file again"
        )
    return tensors


async def _timed(body: AsyncIterator[bytes], until: float) -> AsyncIterator[bytes]:
    """Yield the chunks of a body; end early at `until`, if one takes longer than `CHUNK_S`, or the browser is gone."""
    while (left := until - time.monotonic()) > 0:
        try:
            chunk = await asyncio.wait_for(anext(body), min(CHUNK_S, left))
        except (TimeoutError, ClientDisconnect, StopAsyncIteration):
            return
        if chunk:
            yield chunk


router = APIRouter(prefix=API, responses=PROBLEMS)


@router.post("/uploads", status_code=201, openapi_extra=BODY)
async def upload(request: Request, uploads: Annotated[Uploads, from_state("uploads")]) -> Uploaded:
    """Take a .safetensors file as the body, for a plan's `[run] init`; it goes when it is unused for a day."""
    return await uploads.take(request.stream(), int(request.headers.get("content-length", "0")))


async def remove_each_hour(lock: Path | None) -> None:
    """Remove unused uploads now and every hour, until it is cancelled."""
    while lock is not None:
        with contextlib.suppress(OSError):
            await run_in_threadpool(remove_unused, AggregatorHome(lock.parent).uploads, time.time())
        await asyncio.sleep(CLEAN_EVERY_S)
