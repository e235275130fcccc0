"""The model's versions on disk: one file each, written once, sent to devices as it is.

A file holds one identity frame a segment, then a frame of float buffers where the model has any. It is durable
before the event that names it is recorded, so the journal never names a file that is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from thinwire.aggregation import read_model, write_model
from thinwire.core.errors import DataLost
from thinwire.core.events import ModelStored
from thinwire.core.layout import Layout
from thinwire.core.types import Part, Vector


@dataclass(frozen=True)
class Versions:
    """The files `v000007.model` of one run in its folder."""

    folder: Path
    layout: Layout

    def path(self, version: int) -> Path:
        return self.folder / f"v{version:06d}.model"

    def write(
        self, version: int, params: Vector, buffers: Vector, counters: Mapping[str, int], at: float
    ) -> ModelStored:
        """Make a version durable; `params` and `buffers` are the flat float32 vectors of the layout."""
        path = self.path(version)
        parts, digest = write_model(path, self.layout, params, buffers)
        return ModelStored(
            at, version, digest, path.name, [(p.name, p.length, p.sha256) for p in parts], dict(counters)
        )

    def read(self, stored: ModelStored) -> tuple[Vector, Vector]:
        """(params, buffers) of a version; `DataLost` when the file is gone or not what was recorded."""
        path = self.folder / stored.file
        try:
            params, buffers, digest = read_model(path, self.layout, parts_of(stored))
        except OSError as error:
            raise DataLost(
                f"model version {stored.version} cannot be read", why=str(error), hint="restore a backup"
            ) from error
        if digest != stored.digest:
            raise DataLost(
                f"model version {stored.version} is damaged",
                why=f"its digest is {digest[:12]}, recorded was {stored.digest[:12]}",
                hint="restore a backup, or start anew from an older version: [run] init",
            )
        return params, buffers

    def prune(self, keep: Collection[int]) -> None:
        """Remove all versions but these."""
        wanted = {self.path(version).name for version in keep}
        for path in self.folder.glob("v*.model"):
            if path.name not in wanted:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def parts_of(stored: ModelStored) -> tuple[Part, ...]:
    return tuple(Part(name, length, sha256) for name, length, sha256 in stored.parts)
